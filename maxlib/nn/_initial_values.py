"""Normal distributions of initial values: arrays of all shapes are drawn by one compiled program."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src.interpreters.batching import BatchTracer  # not public; tells vmap from jit, whose programs stay plain
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jaxtyping import Array

Init = Callable[..., Array]
# Number of values of the program. Threefry computes value i from the key and i alone, so that the first values of a
# long array are those of a shorter one.
_SIZE = 1 << 16
_TRUNCATED = np.float32(0.87962566103423978)  # standard deviation of a standard normal truncated to [-2, 2]


def normal(stddev: float) -> Init:
    """Returns an initializer with the values of `nnx.initializers.normal(stddev)`."""
    return functools.partial(_initialized, _normal, np.float32(stddev), nnx.initializers.normal(stddev))


def truncated_normal(fan_in: int, init: Init) -> Init:
    """Returns an initializer with the values of `init`, a truncated normal with variance 1 / fan-in."""
    return functools.partial(_initialized, _truncated, np.sqrt(np.float32(1 / fan_in)) / _TRUNCATED, init)


def _normal(key: Array) -> Array:
    return jax.random.normal(key, (_SIZE,), jnp.float32)


def _truncated(key: Array) -> Array:
    return jax.random.truncated_normal(key, -2, 2, (_SIZE,), jnp.float32)


def _initialized(
    standard: Callable[[Array], Array], stddev: np.float32, init: Init, key: Array, shape: Sequence[int], dtype: Any
) -> Array:
    """Returns the values of `init`, outside of jit by the program that all shapes share.

    A program for each shape takes XLA 0.2 to 0.6 s, which would be most of the time to build a small model.
    """
    size = math.prod(shape)
    direct = functools.partial(init, shape=shape, dtype=dtype)
    if size > _SIZE or dtype != jnp.float32 or not _is_counted(key):
        return direct(key)

    def drawn(keys: Array) -> Array:
        """Draws an array for each of `keys`, `N` or a single key."""
        impl, data = str(jax.random.key_impl(keys)), np.asarray(jax.random.key_data(keys))
        rows = [np.asarray(_draw(standard, impl, row))[:size] * stddev for row in data.reshape(-1, data.shape[-1])]
        # [N, size] -> [N, *shape]
        return jax.device_put(np.stack(rows).reshape(*keys.shape, *shape))

    def of_many(axis_size: int, is_batched: Any, keys: Array) -> tuple[Array, bool]:
        return (jax.vmap(direct)(keys) if isinstance(keys, Tracer) else drawn(keys)), True

    if isinstance(key, BatchTracer):  # layers that are scanned together are built by vmap
        mapped = custom_vmap(direct)
        mapped.def_vmap(of_many)
        return mapped(key)
    return direct(key) if isinstance(key, Tracer) else drawn(key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(standard: Callable[[Array], Array], impl: str, data: Array) -> Array:
    return standard(jax.random.wrap_key_data(data, impl=impl))


def _is_counted(key: Array) -> bool:
    """Returns True if a random value depends on its index alone, not on the shape."""
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return is_key and str(jax.random.key_impl(key)) == "threefry2x32" and jax.threefry_partitionable.value
