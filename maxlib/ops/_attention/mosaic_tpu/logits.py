"""What all kernels do with a tile of raw products of queries and keys."""

import jax.numpy as jnp
from jax import lax


def hide(bent, start, end, first_key, axis: int):
    """`-inf` where a key is not seen; keys run along `axis`, `start` and `end` along the other one."""
    key = first_key + lax.broadcasted_iota(jnp.int32, bent.shape, axis)
    return jnp.where((start <= key) & (key < end), bent, -jnp.inf)


def dot(a, b, axis_a: int, axis_b: int):
    """A matmul over these axes, summed in float32."""
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
