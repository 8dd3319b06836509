"""Operations on a tile of raw products of queries and keys, for all TPU kernels."""

import jax.numpy as jnp
from jax import lax


def hide(bent, start, end, first_key, axis: int):
    """Masks a tile with `-inf`, where keys run along `axis` and `start` and `end` along the other axis."""
    key = first_key + lax.broadcasted_iota(jnp.int32, bent.shape, axis)
    return jnp.where((start <= key) & (key < end), bent, -jnp.inf)


def dot(a, b, axis_a: int, axis_b: int):
    """Multiplies over these axes and accumulates in float32."""
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
