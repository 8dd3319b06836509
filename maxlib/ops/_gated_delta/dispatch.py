"""The implementations of the gated delta rule, in order of preference."""

from typing import Any

from maxlib.kernels.gated_delta import DeltaTPUTiles, refuses
from maxlib.ops import _jax_linear_attention
from maxlib.ops._fla import choice as fla
from maxlib.ops._gated_delta.chunked import delta_tiles
from maxlib.ops._recurrences import SEQUENTIAL, Call, Implementation, Operation


def _tpu_refuses(call: Call, tiles: Any) -> str | None:
    return refuses(call.heads // call.key_heads, call.key_dim, call.value_dim, call.dtype, tiles)


def _widths(call: Call) -> dict[str, int]:
    # The states of G value heads share vector memory with their key head's tokens.
    return {"G": call.heads // call.key_heads, "Hk": call.key_dim, "Hv": call.value_dim}


# In order of speed as far as known. Our kernels only run by name until they have been tested on hardware (decision 24).
TABLE = {
    "mosaic_tpu": Implementation(
        "kernels for TPUs in both passes",
        frozenset({"tpu"}),
        "it has not run on a TPU yet",
        lambda call: DeltaTPUTiles(),
        _tpu_refuses,
    ),
    "jax_linear_attention": _jax_linear_attention.DELTA,
    "fla": fla.DELTA,
    "chunked": Implementation("chunks of tokens in matmuls, by XLA", tiles=delta_tiles),
    "sequential": Implementation(SEQUENTIAL),
}
GATED_DELTA = Operation("gated_delta_rule", TABLE, _widths)
