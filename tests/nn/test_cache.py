"""What caches store and hand back: rounding by each token's and head's own scale, and where rows are put."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn
from maxlib.nn.cache import QuantizedCache, kv_cache

B, T, K, H = 2, 3, 2, 4
# By how much a number differs once rounded, as a part of the largest beside it.
ROUNDED = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}


def sized():
    """Keys and values whose sizes differ from token to token and from head to head by powers of ten."""
    keys = np.random.default_rng(0).uniform(0.1, 1.0, (2, B, T, K, H))
    power = np.arange(B * T * K).reshape(B, T, K, 1) % 7 - 3.0
    return [jnp.asarray(x, jnp.float32) for x in (keys[0] * 10.0**power, -keys[1] * 10.0 ** power[:, ::-1])]


@functools.partial(jax.jit, static_argnames="first")
def extended(cache, keys, values, first=0):
    context = nn.context(B, T, cache=nn.Cache(None, jnp.full(B, first, jnp.int32)))
    bounds = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), T, jnp.int32)
    return cache.extend(keys, values, context, *bounds)


@pytest.mark.parametrize("ring", [None, 5])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_each_token_and_head_is_rounded_by_its_own_scale(dtype, ring):
    cache = kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=ring, dtype=jnp.dtype(dtype))
    slots = ring or 8
    assert isinstance(cache, QuantizedCache)
    assert cache.values.k.shape == (B, slots, K, H) and cache.values.v.dtype == jnp.dtype(dtype)
    assert cache.scales.k.shape == cache.scales.v.shape == (B, slots, K, 1) and cache.scales.k.dtype == jnp.float32
    given = sized()
    cache, *got, _, _ = extended(cache, *given)
    for kept, want in zip(got, given, strict=True):
        new = np.asarray(kept)[:, -T:] if ring else np.asarray(kept)[:, :T]  # a ring hands out the old ones first
        largest = np.abs(np.asarray(want)).max(axis=-1, keepdims=True)
        assert (np.abs(new - np.asarray(want)) <= 1.01 * ROUNDED[dtype] * largest).all()
    for scales, want in ((cache.scales.k, given[0]), (cache.scales.v, given[1])):
        stored = np.asarray(scales)[:, :T, :, 0] * float(127 if dtype == "int8" else jnp.finfo(dtype).max)
        np.testing.assert_allclose(stored, np.abs(np.asarray(want)).max(axis=-1), rtol=0.02)


def test_rows_are_put_behind_what_there_is():
    cache = kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.float32)
    keys, values = sized()
    _, got_keys, got_values, _, _ = extended(cache, keys, values, first=4)
    for got, want in ((got_keys, keys), (got_values, values)):
        np.testing.assert_array_equal(got[:, 4:7], want)
        assert not np.asarray(got[:, :4]).any() and not np.asarray(got[:, 7:]).any()
    full = kv_cache(B, T, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.float32)
    extended(full, keys, values)  # just fits
    small = kv_cache(B, T - 1, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.float32)
    with pytest.raises(ValueError, match="3 new tokens do not fit a cache of capacity 2"):
        extended(small, keys, values)


def test_a_ring_is_made_where_it_is_shorter():
    make = lambda ring: kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=ring, dtype=jnp.bfloat16)
    assert [type(make(ring)).__name__ for ring in (7, 8, None)] == ["RingCache", "KVCache", "KVCache"]


@pytest.mark.parametrize("dtype", ["int4", "int16", "uint8"])
def test_other_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=f"a floating dtype or int8, got {dtype}"):
        kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.dtype(dtype))
