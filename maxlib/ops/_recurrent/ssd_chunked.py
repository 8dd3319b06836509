"""State-space duality in matmuls, chunk by chunk (Dao & Gu 2024, arXiv:2405.21060).

Within a chunk of C tokens, A is the running sum of log decays, and `D[i, j] = exp(A[i] - A[j])` for j <= i in the same
document, else 0. With u = dt x:

    S <- exp(A[C]) S + (exp(A[C] - A) u)^T b,  y = (c b^T D) u + exp(A) S c, with the S before

The first product of y is masked attention without a softmax; the rest depends on the previous chunk. A block computes
what its chunks add to the state at once, then passes the state through them.

Shapes: n chunks of a block, B rows, C tokens of a chunk, G groups, R heads of each, P wide, S the size of b and c.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._recurrent.chunks import (
    ChunkTiles,
    count_starts,
    decays,
    for_each_head,
    in_blocks,
    in_chunks,
    joined,
    over_blocks,
)
from maxlib.ops._recurrent.recurrence import RecurrentCall, Settings

_HEADS = (2, 1, 1, 2, 2, 0)  # axes of heads in each of `SSDInputs`


class SSDInputs(NamedTuple):
    """Inputs of state-space duality for each token.

    Args:
        x: Inputs in their own dtype, `B T G R P`, for the R heads that share a group.
        b: Input projections of the state, in their own dtype, `B T G S`.
        c: Output projections of the state, in their own dtype, `B T G S`.
        dt: Steps, float32 or float64, `B T G R`.
        log_decay: Logarithm of the factor on the state, float32 or float64, `B T G R`.
        is_start: `B T`, True if the state before a token is zero.
    """

    x: Array
    b: Array
    c: Array
    dt: Array
    log_decay: Array
    is_start: Array

    @property
    def stepped(self) -> Array:
        """Inputs times their steps, in the dtype of the steps."""
        return self.dt[..., None] * self.x.astype(self.dt.dtype)


@dataclasses.dataclass(frozen=True)
class SSDTiles(ChunkTiles):
    """Tokens of a chunk and of a block of `chunked`."""

    kernel: ClassVar[str] = "ssd/chunked"


def ssd_tiles(call: RecurrentCall) -> SSDTiles:
    """Chooses tile sizes: on TPUs one chunk a block, as wide as their matmul units, else the default."""
    return SSDTiles(128, 128) if call.platform == "tpu" else SSDTiles()


def chunked(x: SSDInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
        x: Inputs of each token, rates in float32 or float64.
        state: State before the first token, `B G R P S`.
        settings: How it runs; its tiles are `SSDTiles`.

    Returns:
        The outputs, `B T G R P`, and the state after the last token.
    """
    tokens, tiles = x.x.shape[1], cast(SSDTiles, settings.tiles)
    size = min(tiles.chunk, tokens)
    blocks, per_block = tiles.count(tokens, size)
    xs: SSDInputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)
    xs = xs._replace(is_start=count_starts(xs.is_start, size))
    block = functools.partial(_block, size=size, precision=settings.precision)
    return over_blocks(block, xs, state, tokens)


def _block(state: Array, x: SSDInputs, *, size: int, precision: jax.lax.Precision) -> tuple[Array, Array]:
    """Computes the state after one block and its outputs, `B t G R P`."""
    dot = functools.partial(jnp.einsum, precision=precision)
    x = SSDInputs(*(in_chunks(a, heads, size) for a, heads in zip(x, _HEADS, strict=True)))
    b, c, u = x.b.astype(state.dtype), x.c.astype(state.dtype), x.stepped
    # u is `n B G R C P`, b and c are `n B G C S`, rates are `n B G R C`, `is_start` counts starts, `n B C`.
    decay, into, out_of, across = decays(x.log_decay, x.is_start)
    # (exp(A[C] - A) u)^T b: what each chunk adds to the state, `n B G R P S`.
    added = dot("nbgrip,nbgis->nbgrps", out_of[..., None] * u, b)
    state, before = jax.lax.scan(_pass_on, state, (across, added))
    scores = for_each_head(dot("nbgis,nbgjs->nbgij", c, b), u.shape[3])
    within = dot("nbgrij,nbgrjp->nbgrip", scores * decay, u)
    return state, joined(within + into[..., None] * dot("nbgis,nbgrps->nbgrip", c, before), 2)


def _pass_on(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the states after and before a chunk."""
    across, added = chunk
    return across[..., None, None] * state + added, state
