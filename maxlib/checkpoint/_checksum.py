"""A checksum of an array's content that every mesh computes alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxlib.checkpoint._replicas import NO_MESH

_MIX = tuple(np.uint32(c) for c in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F))
# Elements up to which NumPy sums what a CPU holds: compiling a program for a shape takes longer than that.
_FEW = 1 << 16
Sums = tuple[Any, Any]


def digest(x: Any) -> Sums:
    """Computes two 32-bit sums over hashes of each element's bits and place; `x` has any dtype but a key's.

    A sum has no order, so shards add up to the same whatever the mesh, each device reads only what it holds and two
    numbers per device travel. For a given place the hash is one to one: a change of one element is never missed, any
    other one with a chance of 2^-64. Runs where `x` lives, asynchronously but for few elements on CPUs; a later
    donation of `x` waits for it.
    """
    if np.size(x) <= _FEW and _is_on_host(x):
        return _digest_on_host(np.asarray(x))
    with jax.set_mesh(NO_MESH):  # `x` may be on one device, whichever mesh the caller is in
        return _digest(_on_device(x) if isinstance(x, jax.Array) else _words_on_host(np.asarray(x)))


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
    """Returns two hashes of every word and its place; `xp` is jax.numpy, or numpy for words in its arrays."""
    h = (words ^ _places(words.shape, xp)) * _MIX[0]
    h = (h ^ (h >> 15)) * _MIX[1]
    return h, (h ^ (h >> 13)) * _MIX[2]


def _places(shape: tuple[int, ...], xp: Any) -> Any:
    """Returns a number for every place, made of one hash per axis and index."""
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
    if _is_narrow(x.dtype):  # less than a byte: every value is exact in float32
        x = x.astype(xp.float32)
    bits = xp.dtype("uint32" if x.dtype.itemsize > 4 else f"uint{8 * x.dtype.itemsize}")
    return (x.view(bits) if xp is np else lax.bitcast_convert_type(x, bits)).astype(xp.uint32)


def _words_on_host(x: np.ndarray) -> np.ndarray:
    """Returns what `_words` would see, for the dtypes that jax would cut to 32 bits."""
    if x.dtype.itemsize <= 4:
        return x
    if np.issubdtype(x.dtype, np.complexfloating):
        x = np.stack([np.real(x), np.imag(x)], axis=-1)
    words = np.ascontiguousarray(x.reshape(*x.shape, 1)).view(np.uint32)
    return words if x.dtype.itemsize > 4 else words.reshape(x.shape)


def _is_narrow(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _on_device(x: jax.Array) -> jax.Array:
    """Moves `x` to its devices' own memory, where it may have been offloaded to the host's."""
    kind = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, kind) else jax.device_put(x, x.sharding.with_memory_kind(kind))
