"""Gated delta rule in matmuls, chunk by chunk (Yang et al. 2024, arXiv:2412.06464).

Within a chunk of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for j <= i in the same
document, else 0. All updates of a chunk follow from one unit triangular system:

    (I + strict_lower(beta k k^T D)) T = I,  U = T (beta v),  W = T (beta exp(G) k)
    V = U - W S,  o = exp(G) q S + (q k^T D) V,  S <- exp(G[C]) S + (exp(G[C] - G) k)^T V

Only the last line depends on the previous chunk. Chunks are processed in blocks: a block computes the first line for
all its chunks at once, then passes its state through them. The backward pass saves only the state at the beginning of
each block and recomputes the rest, so memory per token does not depend on the size of the state.

Shapes: B rows, n chunks of a block, C tokens of a chunk, K key heads, G value heads of each, Hk and Hv wide.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._chunks import ChunkTiles, decays, for_each_head, split
from maxlib.ops._gated_delta.inputs import Inputs, widened
from maxlib.ops._varying import vary_alike

SMALL = 16  # largest triangle that is inverted by doubling
_HEADS = (1, 1, 2, 2, 2, 0)  # axes of heads in each of `Inputs`


class _Chunks(NamedTuple):
    """Factors with which the chunks of a block update a state; the chunk is the first axis.

    Args:
      readers: W stacked on exp(G) q, `n B K G 2C Hk`, which read the state before the chunk.
      u: `n B K G C Hv`.
      writers: exp(G[C] - G) k, `n B K G C Hk`.
      kept: exp(G[C]), `n B K G`.
    """

    readers: Array
    u: Array
    writers: Array
    kept: Array


@dataclasses.dataclass(frozen=True)
class DeltaTiles(ChunkTiles):
    """Tokens of a chunk, a power of two as its triangle is inverted by doubling, and of a block of `chunked`."""

    kernel: ClassVar[str] = "gated_delta_rule/chunked"

    def __post_init__(self):
        super().__post_init__()
        self.require(SMALL, "chunk")
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"DeltaTiles: chunk must be a power of two, got {self.chunk}")


def chunked(
    x: Inputs,
    state: Array,
    *,
    scale: float,
    l2_norm: bool,
    precision: jax.lax.Precision,
    tiles: ChunkTiles = DeltaTiles(),
) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
      x: inputs of each token; queries and keys not yet scaled or normalized.
      state: state before the first token, `B K G Hk Hv`.
      scale: factor on the queries.
      l2_norm: True if queries and keys are to have length one.
      precision: precision of the matmuls; the triangular system is solved in the highest precision.
      tiles: tokens of a chunk and of a block.

    Returns:
      The outputs, `B T K G Hv`, and the state after the last token.
    """
    tokens = x.q.shape[1]
    size = min(tiles.chunk, max(SMALL, 1 << (tokens - 1).bit_length()))  # a power of two
    blocks, per_block = tiles.count(tokens, size)
    # Transpose once to the order in which the matmuls read them, instead of in every block.
    xs = Inputs(*(split(a, heads, blocks, per_block, size) for a, heads in zip(x, _HEADS, strict=True)))
    xs, state = vary_alike((xs, state))
    # Each block widens and normalizes its own queries and keys; for all tokens at once, XLA would make several copies.
    run = lambda state, x: _block(state, widened(x, scale=scale, l2_norm=l2_norm), precision=precision)
    block = jax.checkpoint(run, prevent_cse=False)
    state, out = jax.lax.scan(block, state, xs)
    # [blocks, n, B, K, G, C, Hv] -> [B, blocks, n, C, K, G, Hv] -> [B, T, K, G, Hv]
    out = jnp.moveaxis(out, (2, 5), (0, 3))
    return out.reshape(out.shape[0], -1, *out.shape[4:])[:, :tokens], state


def _block(state: Array, x: Inputs, *, precision: jax.lax.Precision) -> tuple[Array, Array]:
    """Computes the state after one block and its outputs, `n B K G C Hv`."""
    dot = functools.partial(jnp.einsum, precision=precision)
    chunks, scores = _chunks(x, dot)

    def step(state, chunk: _Chunks):
        # [2C, Hk] [Hk, Hv]: W S, and the queries' reads of the state.
        read = dot("bkgid,bkgdv->bkgiv", chunk.readers, state)
        taken, out = jnp.split(read, 2, axis=-2)
        values = chunk.u - taken
        written = dot("bkgid,bkgiv->bkgdv", chunk.writers, values)
        return chunk.kept[..., None, None] * state + written, (values, out)

    state, (values, out) = jax.lax.scan(step, state, chunks)
    # Outputs of all chunks: contributions of the previous state and of the chunk itself.
    return state, out + dot("nbkgij,nbkgjv->nbkgiv", scores, values)


def _chunks(x: Inputs, dot) -> tuple[_Chunks, Array]:
    """Computes the state updates of all chunks of a block, and the scores `q k^T D`, `n B K G C C`."""
    # q and k are `n B K C Hk`, v is `n B K G C Hv`, rates are `n B K G C`.
    decay, into, out_of, kept = decays(x.log_decay, x.is_start)
    q, k, of_k, of_q = (
        for_each_head(a, x.v.shape[3])
        for a in (x.q, x.k, dot("nbkid,nbkjd->nbkij", x.k, x.k), dot("nbkid,nbkjd->nbkij", x.q, x.k))
    )
    times = lambda weight, a: weight[..., None] * a
    solve = functools.partial(
        dot, "nbkgij,nbkgjd->nbkgid", unit_lower_inverse(jnp.tril(times(x.beta, of_k) * decay, -1))
    )
    readers = jnp.concatenate([solve(times(x.beta * into, k)), times(into, q)], axis=-2)
    return _Chunks(readers, solve(times(x.beta, x.v)), times(out_of, k), kept), of_q * decay


@jax.custom_vjp
def unit_lower_inverse(lower: Array) -> Array:
    """Returns `(I + lower)^-1` of strictly lower triangular matrices `... C C`, C a power of two, by matmuls."""
    return _inverse(lower)


def _inverse(lower: Array) -> Array:
    size = lower.shape[-1]
    if size <= SMALL:
        return _doubled(lower)
    # [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]], both halves at once.
    half = size // 2
    above, left, below = lower[..., :half, :half], lower[..., half:, :half], lower[..., half:, half:]
    above, below = _inverse(jnp.stack([above, below]))
    corner = -_matmul(_matmul(below, left), above)
    return jnp.block([[above, jnp.zeros_like(above)], [corner, below]])


def _doubled(lower: Array) -> Array:
    """Inverts small matrices: blocks on the diagonal grow from size one by doubling."""
    size = lower.shape[-1]
    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    inverse, block = jnp.broadcast_to((i == j).astype(lower.dtype), lower.shape), 1
    while block < size:
        # The lower left quarter of each new block of twice the size.
        corner = jnp.broadcast_to((i // (2 * block) == j // (2 * block)) & (i // block > j // block), lower.shape)
        inverse = inverse - _matmul(_matmul(inverse, jnp.where(corner, lower, 0)), inverse)
        block *= 2
    return inverse


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    # d (I + L)^-1 = -T dL T, so the gradient of L is -T^T g T^T.
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(_matmul(turned, gradient), turned), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
