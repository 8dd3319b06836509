"""Kernels that have no batch, under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def unbatched(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Runs a kernel for each entry of a batch, one after another: `jax.vmap` over a pipeline's stages, of which a
    device has one.

    Args:
        kernel: A function of arrays only, whose result is one array.

    Returns:
        The same function, which `jax.vmap` never gives a batch.
    """
    one = jax.custom_batching.custom_vmap(kernel)

    @one.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: Any):
        pick = lambda i: [a[i] if batched else a for a, batched in zip(arrays, is_batched, strict=True)]
        return jnp.stack([one(*pick(i)) for i in range(size)]), True

    return one
