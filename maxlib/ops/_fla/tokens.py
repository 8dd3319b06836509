"""Tokens in chunks: sums of decays, documents, and rows of whole chunks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

CHUNK = 64
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453  # the kernels compute `exp2`
RESET = -160.0  # `exp2` of it is 0 in float32


def in_chunks(x: Array) -> Array:
    """Pads the second axis, tokens, with zeros to whole chunks."""
    rest = -x.shape[1] % CHUNK
    return jnp.pad(x, [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)]) if rest else x


def summed(log_decay: Array, is_start: Array | None) -> Array:
    """Sums logarithms of decays up to each token of a chunk, to the base 2.

    A document's first token gets a decay of 0 in float32, so that nothing before it reaches what follows: neither the
    state before its chunk nor the tokens before it in the chunk.

    Args:
      log_decay: natural logarithms, `B T ...`.
      is_start: True for the first token of a document, `B T`; None if no document begins in a row.

    Returns:
      The sums, in float32, for whole chunks.
    """
    x = log_decay.astype(jnp.float32) * LOG2E
    if is_start is not None:
        x = jnp.where(is_start.reshape(*is_start.shape, *[1] * (x.ndim - 2)), RESET, x)
    x = in_chunks(x)
    chunks = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    # As a matmul with ones, whose gradient is one too; XLA's sums along an axis take several passes on a GPU.
    ones = jnp.tri(CHUNK, dtype=x.dtype)
    return jnp.einsum("ts,bcs...->bct...", ones, chunks, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)


def joined(x: Array, axis: int = 2) -> Array:
    """Joins the axes of key heads, or groups, and of the heads of each."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def per_head(x: Array, heads: int) -> Array:
    """Repeats what heads share, the third axis, for each of them."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def per_group(x: Array, like: Array) -> Array:
    """Sums gradients of each head, the third axis, over those that share an array, in float32."""
    shared = like.shape[2]
    # Kernels write these for each head, in the dtype of the operands: only their sum is rounded once more.
    by_group = x.reshape(*x.shape[:2], shared, -1, *x.shape[3:])
    return by_group.sum(3, dtype=jnp.float32).astype(like.dtype)


def lower(x: Array) -> Array:
    """Clears what a kernel leaves unwritten in `B T N 64`: the columns right of the diagonal of each chunk."""
    row, column = in_chunk(x.shape[1])
    return jnp.where(row >= column, x, 0)


def in_chunk(tokens: int) -> tuple[Array, Array]:
    """Returns the place of each token in its chunk, `1 T 1 1`, and that of those it is compared with, `1 1 1 64`."""
    place = jnp.arange(tokens) % CHUNK
    return place[None, :, None, None], place[None, None, None, :CHUNK]


def sizes(k: Array, v: Array) -> dict[str, Any]:
    """Returns the sizes of keys, `B T K Hk`, and values, `B T N Hv`, as the kernels call them."""
    (_, T, N, V), (K, S) = v.shape, k.shape[2:]
    return {"T": T, "H": K, "HV": N, "K": S, "V": V, "BT": CHUNK, "STATE_V_FIRST": False}


def chunks_and_heads(v: Array) -> tuple[int, int]:
    """Returns a grid: the chunks of a row, and the heads of all rows, of values `B T N Hv`."""
    return v.shape[1] // CHUNK, v.shape[0] * v.shape[2]
