"""The implementations of Kimi delta attention, in order of preference."""

from maxlib.ops import _jax_linear_attention
from maxlib.ops._fla import choice as fla
from maxlib.ops._kda.chunked import kimi_tiles
from maxlib.ops._recurrences import SEQUENTIAL, Call, Implementation, Operation


def _widths(call: Call) -> dict[str, int]:
    return {"Hk": call.key_dim, "Hv": call.value_dim}


TABLE = {
    "jax_linear_attention": _jax_linear_attention.KIMI,
    "fla": fla.OTHER,
    "chunked": Implementation("chunks of tokens in matmuls, by XLA", tiles=kimi_tiles),
    "sequential": Implementation(SEQUENTIAL),
}
KIMI_DELTA = Operation("kimi_delta_attention", TABLE, _widths)
