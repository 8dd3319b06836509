"""Support for `jax.vmap` of kernels that have no batch axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def unbatched(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps a kernel so that `jax.vmap` runs it for each entry of a batch in turn.

    The batch is usually the stages of a pipeline, and each device has one of them.

    Args:
        kernel: A function of arrays only, whose result is one array.

    Returns:
        The wrapped function.
    """
    mapped = jax.custom_batching.custom_vmap(kernel)

    @mapped.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: Any):
        pairs = list(zip(arrays, is_batched, strict=True))
        return jnp.stack([mapped(*(a[i] if batched else a for a, batched in pairs)) for i in range(size)]), True

    return mapped
