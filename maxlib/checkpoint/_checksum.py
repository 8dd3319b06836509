"""A checksum of an array's content that does not depend on the mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxlib._utils.varying import NO_MESH

_MIX = tuple(np.uint32(c) for c in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F))
# Elements up to which NumPy sums what a CPU holds: compiling a program for a shape takes longer than that.
_FEW = 1 << 16
Sums = tuple[Any, Any]


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns a checksum of the bits of each array as hexadecimal digits, which does not depend on the mesh.

    A change of one element is always detected, other changes are missed with probability 2^-64. Each device reads its
    own shards.

    Args:
        arrays: Arrays of any dtype except keys, on devices or of numpy.
    """
    sums = {name: digest(array) for name, array in arrays.items()}  # start all of them before waiting for one
    return {name: to_hex(pair) for name, pair in sums.items()}


def digest(x: Any) -> Sums:
    """Computes two 32-bit sums over hashes of each element's bits and index, for any dtype except keys.

    Sums do not depend on the order, so the result is the same for every mesh, each device only reads its own shard, and
    only two numbers per device are communicated. For a given index the hash is injective: a change of one element is
    always detected, other changes are missed with probability 2^-64. It runs asynchronously on the devices of `x`,
    except for few elements on CPUs; a later donation of `x` waits for it.
    """
    if np.size(x) <= _FEW and _is_on_host(x):
        return _digest_on_host(np.asarray(x))
    with jax.set_mesh(NO_MESH):  # `x` may be on one device, independent of the caller's mesh
        sums = _digest(_on_device(x) if isinstance(x, jax.Array) else _words_on_host(np.asarray(x)))
    if isinstance(x, jax.Array) and not x.is_fully_addressable and jax.default_backend() == "cpu":
        jax.block_until_ready(sums)  # processes on CPUs run several programs in any order, and wait for each other
    return sums


def to_hex(sums: Sums) -> str:
    """Waits for `digest` and returns it as hexadecimal digits."""
    return "".join(f"{int(s.addressable_data(0) if isinstance(s, jax.Array) else s):08x}" for s in sums)


def _is_on_host(x: Any) -> bool:
    if not isinstance(x, jax.Array):
        return True
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.sharding.device_set)


def _digest_on_host(x: np.ndarray) -> Sums:
    with np.errstate(over="ignore"):  # sums and products are modulo 2^32
        words = _words(_words_on_host(x), np)
        h, g = _hashes(words, np)
        return h.sum(dtype=np.uint32), g.sum(dtype=np.uint32)


@jax.jit
def _digest(x: jax.Array) -> Sums:
    words = _words(x)
    h, g = _hashes(words)
    zero = np.uint32(0)
    # One reduction over both: XLA on CPU runs it ten times as fast as two plain sums.
    return lax.reduce((h, g), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(words.ndim)))


def _hashes(words: Any, xp: Any = jnp) -> Sums:
    """Returns two hashes of every word and its index; `xp` is the array namespace, jax.numpy or numpy."""
    h = (words ^ _places(words.shape, xp)) * _MIX[0]
    h = (h ^ (h >> 15)) * _MIX[1]
    return h, (h ^ (h >> 13)) * _MIX[2]


def _places(shape: tuple[int, ...], xp: Any) -> Any:
    """Returns a number for every index, combined from one hash per axis."""
    places = xp.full((1,) * len(shape), _MIX[3])
    for axis, size in enumerate(shape):
        h = (xp.arange(size, dtype=xp.uint32) + np.uint32(7919 * axis + 1)) * _MIX[1]
        h = (h ^ (h >> 16)) * _MIX[2]
        h = h ^ (h >> 13)
        places = places + h.reshape([size if i == axis else 1 for i in range(len(shape))])
    return places


def _words(x: Any, xp: Any = jnp) -> Any:
    """Returns the bits of `x` as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(xp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = xp.stack([xp.real(x), xp.imag(x)], axis=-1)
    if is_narrow(x.dtype):  # less than a byte: every value is exact in float32
        x = x.astype(xp.float32)
    bits = xp.dtype("uint32" if x.dtype.itemsize > 4 else f"uint{8 * x.dtype.itemsize}")
    return (x.view(bits) if xp is np else lax.bitcast_convert_type(x, bits)).astype(xp.uint32)


def _words_on_host(x: np.ndarray) -> np.ndarray:
    """Returns the result of `_words` on the host, for dtypes that jax would truncate to 32 bits."""
    if x.dtype.itemsize <= 4:
        return x
    if np.issubdtype(x.dtype, np.complexfloating):
        x = np.stack([np.real(x), np.imag(x)], axis=-1)
    words = np.ascontiguousarray(x.reshape(*x.shape, 1)).view(np.uint32)
    return words if x.dtype.itemsize > 4 else words.reshape(x.shape)


def is_narrow(dtype: Any) -> bool:
    """Returns whether an element has less than a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _on_device(x: jax.Array) -> jax.Array:
    """Copies `x` to device memory if it was offloaded to host memory."""
    kind = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, kind) else jax.device_put(x, x.sharding.with_memory_kind(kind))
