"""Inverses of unit lower triangular matrices in matmuls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

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
