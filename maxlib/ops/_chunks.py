"""What recurrences in chunks share: sequences cut into chunks, and the decays between the tokens of one.

Shapes: B rows, n chunks, C tokens of a chunk, K key heads (groups), G heads of each.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array


def split(a: Array, heads: int, blocks: int, per_block: int, size: int) -> Array:
    """Splits `B T heads ...` into chunks, `blocks n B heads C ...`.

    Tokens that fill the last chunk are zero and change nothing.
    """
    missing = blocks * per_block * size - a.shape[1]
    a = jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
    a = a.reshape(a.shape[0], blocks, per_block, size, *a.shape[2:])
    return jnp.moveaxis(a, (0, 3), (2, 3 + heads))


def for_each_head(a: Array, count: int) -> Array:
    """Repeats what belongs to a key head for its heads, `n B K ... -> n B K G ...`."""
    return cast(Array, _repeat(a, count))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat(a: Array, count: int) -> Array:
    return jnp.broadcast_to(a[:, :, :, None], (*a.shape[:3], count, *a.shape[3:]))


def _repeat_backward(count: int, _: None, gradient: Array) -> tuple[Array]:
    # Halves are added, again and again: XLA for CPUs takes ten times as long for a sum over an axis in the middle.
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
      D, `n B K G C C`; the factor on the state that comes in as each token sees it, `n B K G C`; the factor on what
      each token leaves in the state that goes out, `n B K G C`; and the factor on the state itself, `n B K G`.
    """
    total, between = jnp.cumsum(log_decay, axis=-1), _between(log_decay)
    document = jnp.cumsum(is_start, axis=-1)[:, :, None, None]  # n B 1 1 C: 0 for the one that began before
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

    Each sum is added up by itself. A difference of running sums would lose the digits of slow decays after fast ones,
    and leave rounding errors in gradients where fast decays have nearly none.
    """
    token = jnp.arange(log_decay.shape[-1])
    # l, i, j: True where j < l <= i.
    inside = (token[None, None, :] < token[:, None, None]) & (token[:, None, None] <= token[None, :, None])
    return jnp.einsum("...l,lij->...ij", log_decay, inside.astype(log_decay.dtype), precision="highest")
