"""Helpers of chunked recurrences: splitting sequences into chunks, and decays between the tokens of a chunk.

Shapes: B rows, n chunks, C tokens of a chunk, K key heads (groups), G heads of each.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.kernels.tile_sizes import TileSizes


@dataclasses.dataclass(frozen=True)
class ChunkTiles(TileSizes):
    """Tokens of a chunk, whose pairs are computed in matmuls, and of a block, whose chunks are computed at once."""

    chunk: int = 64
    block: int = 256  # whose intermediates fit into the cache of a CPU

    def __post_init__(self):
        self.require()

    def count(self, tokens: int, chunk: int) -> tuple[int, int]:
        """Returns the number of blocks of T tokens in chunks of this length, and of chunks of a block."""
        # 2000 tokens in chunks of 64 are 32 chunks: two blocks of 1024 tokens, 16 chunks each.
        count = -(-tokens // chunk)
        per_block = min(count, max(1, self.block // chunk))
        return -(-count // per_block), per_block


def split(a: Array, heads: int, blocks: int, per_block: int, size: int) -> Array:
    """Splits `B T heads ...` into chunks, `blocks n B heads C ...`.

    The last chunk is padded with zeros, which have no effect.
    """
    missing = blocks * per_block * size - a.shape[1]
    a = jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
    a = a.reshape(a.shape[0], blocks, per_block, size, *a.shape[2:])
    return jnp.moveaxis(a, (0, 3), (2, 3 + heads))


def for_each_head(a: Array, count: int) -> Array:
    """Repeats values of a key head for its G heads, `n B K ... -> n B K G ...`."""
    return cast(Array, _repeat(a, count))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat(a: Array, count: int) -> Array:
    return jnp.broadcast_to(a[:, :, :, None], (*a.shape[:3], count, *a.shape[3:]))


def _repeat_backward(count: int, _: None, gradient: Array) -> tuple[Array]:
    # Add halves repeatedly: XLA for CPUs takes ten times as long for a sum over an axis in the middle.
    while (size := gradient.shape[3]) > 1:
        half = size // 2
        rest = gradient[:, :, :, 2 * half :]  # the last one of an odd number
        gradient = jnp.concatenate([gradient[:, :, :, :half] + gradient[:, :, :, half : 2 * half], rest], axis=3)
    return (gradient[:, :, :, 0],)


_repeat.defvjp(lambda a, count: (_repeat(a, count), None), _repeat_backward)


def decays(log_decay: Array, is_start: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the factors between the tokens of a chunk, and between each token and the states around the chunk.

    Args:
      log_decay: `n B K G C`.
      is_start: `n B C`.

    Returns:
      Four factors: D, `n B K G C C`; from the incoming state to each token, `n B K G C`; from each token to the
      outgoing state, `n B K G C`; from the incoming to the outgoing state, `n B K G`.
    """
    total, between = jnp.cumsum(log_decay, axis=-1), _between(log_decay)
    # n B 1 1 C: 0 for the document that began in an earlier chunk
    document = jnp.cumsum(is_start, axis=-1)[:, :, None, None]
    last = document[..., -1:]
    documents = document[..., :, None], document[..., None, :]
    same = jnp.tril(documents[0] == documents[1])
    exp_where = lambda keep, exponent: jnp.exp(jnp.where(keep, exponent, -jnp.inf))
    decay = exp_where(same, between)
    into = exp_where(document == 0, total)
    out_of = exp_where(document == last, between[..., -1, :])
    return decay, into, out_of, exp_where(last == 0, total[..., -1:])[..., 0]


def _between(log_decay: Array) -> Array:
    """Sums the log decays after token j up to token i: `... C` to `... C C`, 0 above the diagonal.

    Differences of running sums would lose the digits of slow decays after fast ones, and leave rounding errors in the
    gradients of fast decays, which are nearly zero.
    """
    token = jnp.arange(log_decay.shape[-1])
    # l, i, j: True where j < l <= i.
    inside = (token[None, None, :] < token[:, None, None]) & (token[:, None, None] <= token[None, :, None])
    return jnp.einsum("...l,lij->...ij", log_decay, inside.astype(log_decay.dtype), precision="highest")
