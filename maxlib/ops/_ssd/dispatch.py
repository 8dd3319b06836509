"""The implementations of state-space duality, in order of preference."""

from maxlib.ops import _jax_linear_attention
from maxlib.ops._fla import choice as fla
from maxlib.ops._recurrences import SEQUENTIAL, Call, Implementation, Operation
from maxlib.ops._ssd.chunked import ssd_tiles


def _widths(call: Call) -> dict[str, int]:
    return {"P": call.value_dim, "S": call.key_dim}


TABLE = {
    "jax_linear_attention": _jax_linear_attention.SSD,
    "fla": fla.OTHER,
    "chunked": Implementation("chunks of tokens in matmuls, by XLA", tiles=ssd_tiles),
    "sequential": Implementation(SEQUENTIAL),
}
SSD = Operation("ssd", TABLE, _widths)
