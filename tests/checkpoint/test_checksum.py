"""The checksum equals its formula on every mesh, and changes with every bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.checkpoint import _checksum as checksum


def checksum_of(x) -> str:
    return checksum.to_hex(checksum.digest(x))


def compiled(x) -> str:
    """By the program for arrays of many elements, and of other devices than CPUs."""
    return checksum.to_hex(checksum._digest(jnp.asarray(x)))


def by_formula(x: np.ndarray) -> str:
    """In Python's integers, one element at a time: what later versions must agree with."""
    cut = (1 << 32) - 1
    places, a, b, c = 0x27D4EB2F, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
    first = second = 0
    for index, word in np.ndenumerate(x):
        place = places
        for axis, i in enumerate(index):
            h = (i + 7919 * axis + 1) * b & cut
            h = (h ^ h >> 16) * c & cut
            place = place + (h ^ h >> 13) & cut
        h = (int(word) ^ place) * a & cut
        h = (h ^ h >> 15) * b & cut
        first, second = first + h & cut, second + ((h ^ h >> 13) * c & cut) & cut
    return f"{first:08x}{second:08x}"


@pytest.mark.parametrize("shape", [(), (2, 3, 4)], ids=str)
def test_it_is_the_formula(shape):
    x = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    assert compiled(x) == checksum_of(jnp.asarray(x)) == checksum_of(x) == by_formula(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4", "complex64"])
def test_host_and_device_agree(dtype):
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(jnp.dtype(dtype))
    assert checksum_of(x) == compiled(x)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_wide_host_arrays_are_not_cut(dtype):
    x = (
        np.random.default_rng(0).normal(size=(3, 5)).astype(dtype) + np.array(2, dtype) ** -40
        if dtype != "int64"
        else np.arange(3)
    )
    y = x.copy()
    y.view(np.uint8).reshape(-1)[0] ^= 1  # the lowest bit
    assert checksum_of(x) != checksum_of(y)
    with jax.enable_x64(True):
        assert compiled(x) == checksum_of(jnp.asarray(x)) == checksum_of(x)


def test_every_single_bit_counts():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    sums = {checksum_of(x)}
    for byte in range(x.nbytes):
        for bit in range(8):
            y = x.copy()
            y.view(np.uint8).reshape(-1)[byte] ^= 1 << bit
            sums.add(checksum_of(y))
    assert len(sums) == 1 + 8 * x.nbytes


def test_signs_swaps_shapes_and_zeros_count():
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    others = [-x, x[::-1], x[:, ::-1], x.reshape(4, 3), x.T, np.zeros_like(x), np.zeros((4, 3), np.float32)]
    assert len({checksum_of(np.ascontiguousarray(y)) for y in [x, *others]}) == 8
    nan = np.array([np.nan], np.float32)
    assert checksum_of(nan) != checksum_of((nan.view(np.uint32) | 1).view(np.float32))


@pytest.mark.parametrize("spec", [P("b", "a"), P(None, ("a", "b"))], ids=str)
def test_every_mesh_computes_it_alike_without_gathering(spec):
    x = jax.random.normal(jax.random.key(0), (16, 64, 6))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    assert compiled(sharded) == checksum_of(sharded) == checksum_of(x)
    program = checksum._digest.lower(sharded).compile().as_text()
    assert f"f32[{x.size}]" not in program and "f32[16,64,6]" not in program


def test_dtypes_below_a_byte_are_told_apart():
    x = np.arange(-8, 8).astype(ml_dtypes.int4)
    assert len({checksum_of(jnp.roll(jnp.asarray(x), i)) for i in range(16)}) == 16
