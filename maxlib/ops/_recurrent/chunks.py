"""Helpers of chunked recurrences: cutting sequences into chunks, decays between the tokens of a chunk, and inverses.

Shapes: B rows, n chunks, C tokens of a chunk, K key heads (groups), G heads of each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
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
        # 2000 tokens in chunks of 64 are 32 chunks: eight blocks of 256 tokens, 4 chunks each.
        count = -(-tokens // chunk)
        per_block = min(count, max(1, self.block // chunk))
        return -(-count // per_block), per_block


def in_blocks(a: Array, blocks: int, tokens: int) -> Array:
    """Splits `B T ...` into blocks of tokens, `blocks B t ...`; the last one is padded with zeros, without effect."""
    a = jnp.pad(a, [(0, 0), (0, blocks * tokens - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], blocks, tokens, *a.shape[2:]), 1, 0)


def over_blocks(block: Callable, xs: Any, state: Array, tokens: int) -> tuple[Array, Array]:
    """Passes a state through blocks of tokens.

    The backward pass saves only the inputs and the state before each block and computes the rest again, so memory per
    token does not depend on the size of the state.

    Args:
        block: Function of the state before a block and its inputs that returns the state after it, and its outputs,
            `B t ...`.
        xs: Inputs, `blocks B t ...`.
        state: State before the first block.
        tokens: Number T of tokens without the padding.

    Returns:
        The outputs, `B T ...`, and the state after the last block.
    """
    xs, state = vary_alike((xs, state))
    state, out = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), state, xs)
    # [blocks, B, t, ...] -> [B, T, ...]
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :tokens], state


def in_chunks(a: Array, heads: int, size: int) -> Array:
    """Splits a block `B t heads ...` into chunks of C tokens, heads first: `n B heads C ...`."""
    a = a.reshape(a.shape[0], -1, size, *a.shape[2:])
    return jnp.moveaxis(a, (1, 2), (0, 2 + heads))  # [B, n, C, heads, ...] -> [n, B, heads, C, ...]


def joined(a: Array, heads: int) -> Array:
    """Inverts `in_chunks`."""
    a = jnp.moveaxis(a, (0, 2 + heads), (1, 2))
    return a.reshape(a.shape[0], -1, *a.shape[3:])


def for_each_head(a: Array, count: int) -> Array:
    """Repeats values of a key head for its G heads, `n B K ... -> n B K G ...`."""
    return cast(Array, _repeat(a, count))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat(a: Array, count: int) -> Array:
    return jnp.broadcast_to(a[:, :, :, None], (*a.shape[:3], count, *a.shape[3:]))


def sum_heads(a: Array) -> Array:
    """Sums over the G heads of a key head, `n B K G ... -> n B K ...`."""
    # Add halves repeatedly: XLA for CPUs takes ten times as long for a sum over an axis in the middle.
    while (size := a.shape[3]) > 1:
        half = size // 2
        rest = a[:, :, :, 2 * half :]  # the last one of an odd number
        a = jnp.concatenate([a[:, :, :, :half] + a[:, :, :, half : 2 * half], rest], axis=3)
    return a[:, :, :, 0]


_repeat.defvjp(lambda a, count: (_repeat(a, count), None), lambda count, _, gradient: (sum_heads(gradient),))


def count_starts(is_start: Array | None, size: int) -> Array | None:
    """Counts the documents that begin in a chunk of C tokens up to each token, along the last axis; None of None.

    Counted for all chunks at once: within a loop over blocks, XLA for CPUs would count again for each pair of tokens.
    """
    if is_start is None:
        return None
    return jnp.cumsum(is_start.reshape(*is_start.shape[:-1], -1, size), axis=-1).reshape(is_start.shape)


def decays(log_decay: Array, starts: Array | None) -> tuple[Array, Array, Array, Array]:
    """Returns the factors between the tokens of a chunk, and between each token and the states around the chunk.

    Args:
        log_decay: `n B K G C`.
        starts: Number of documents that begin in the chunk up to each token, `n B C` (`count_starts`); None if there
            are none.

    Returns:
        Four factors: D, `n B K G C C`; from the incoming state to each token, `n B K G C`; from each token to the
        outgoing state, `n B K G C`; from the incoming to the outgoing state, `n B K G`.
    """
    size = log_decay.shape[-1]
    # [i, l]: token l is not after i. [l, j]: l is after j.
    until, after = jnp.tri(size, dtype=bool), jnp.tri(size, k=-1, dtype=bool)
    # Sums of the log decays up to i, after j, and after j up to i. Differences of running sums would lose the digits of
    # slow decays after fast ones, and leave rounding errors in the gradients of fast decays, which are nearly zero.
    total, rest = _sums(log_decay, until.T), _sums(log_decay, after)  # n B K G C
    square = (*log_decay.shape, size)
    between = _sums(jnp.tril(jnp.broadcast_to(log_decay[..., None, :], square)), after)
    until = jnp.broadcast_to(until, square)
    if starts is None:
        return _exp_where(until, between), jnp.exp(total), jnp.exp(rest), jnp.exp(total[..., -1])
    # n B 1 1 C: 0 for the document that began in an earlier chunk
    document = starts[:, :, None, None]
    last = document[..., -1:]
    decay = _exp_where(until & (document[..., :, None] == document[..., None, :]), between)
    into, out_of = _exp_where(document == 0, total), _exp_where(document == last, rest)
    return decay, into, out_of, _exp_where(last == 0, total[..., -1:])[..., 0]


def _sums(a: Array, mask: Array) -> Array:
    """Sums the elements of the last axis that each column of a mask keeps."""
    return jnp.einsum("...l,li->...i", a, mask.astype(a.dtype), precision="highest")


def _exp_where(keep: Array, exponent: Array) -> Array:
    return jnp.exp(jnp.where(keep, exponent, -jnp.inf))


# ---------------------------------------------------------------------------------------------- triangles

SMALL = 16  # largest triangle that is inverted by doubling


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
