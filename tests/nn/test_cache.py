"""Caches: rounding with a scale per token and head, and the placement of rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, ops
from maxlib.nn.cache import LatentCache, QuantizedCache, kv_cache, make_rewindable, put_rows
from maxlib.ops._attention import splash
from tests.ops.attention.kernels import by_name, reference

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
    context = nn.make_context(B, T, cache=nn.cache.Cache(None, jnp.full(B, first, jnp.int32)))
    bounds = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), T, jnp.int32)
    return cache.extend(keys, values, context, *bounds)


@pytest.mark.parametrize("ring", [None, 5])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_each_token_and_head_is_rounded_by_its_own_scale(dtype, ring):
    cache = kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=ring, dtype=jnp.dtype(dtype))
    slots = ring or 8
    assert isinstance(cache, QuantizedCache)
    assert cache.values.k.shape == (B, K, slots, H) and cache.values.v.dtype == jnp.dtype(dtype)
    assert cache.scales.k.shape == cache.scales.v.shape == (B, K, slots, 1) and cache.scales.k.dtype == jnp.float32
    exact = sized()
    cache, *got, _, _ = extended(cache, *exact)
    for kept, want in zip(got, exact, strict=True):
        new = np.asarray(kept)[:, -T:] if ring else np.asarray(kept)[:, :T]  # a ring hands out the old ones first
        largest = np.abs(np.asarray(want)).max(axis=-1, keepdims=True)
        assert (np.abs(new - np.asarray(want)) <= 1.01 * ROUNDED[dtype] * largest).all()
    for scales, want in ((cache.scales.k, exact[0]), (cache.scales.v, exact[1])):
        stored = np.asarray(scales)[:, :, :T, 0].swapaxes(1, 2) * float(
            127 if dtype == "int8" else jnp.finfo(dtype).max
        )
        np.testing.assert_allclose(stored, np.abs(np.asarray(want)).max(axis=-1), rtol=0.02)


def test_a_cache_that_is_known_to_be_empty_is_written_without_reading_it():
    old, (new, _) = kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.float32).k, sized()
    put = lambda length: put_rows(
        old + 1, new.swapaxes(1, 2), nn.make_context(B, T, cache=nn.cache.Cache(None, length)), axis=2
    )
    empty, two = (jnp.asarray(np.full(B, length, np.int32)) for length in (0, 2))
    np.testing.assert_array_equal(jax.jit(lambda: put(empty))(), jax.jit(put)(empty))
    programs = str(jax.make_jaxpr(lambda: put(empty))()), str(jax.make_jaxpr(put)(empty))
    assert ["gather" in text for text in programs] == [False, True]
    np.testing.assert_array_equal(jax.jit(lambda: put(two))(), jax.jit(put)(two))  # known, but not empty


@pytest.mark.parametrize("dtype", ["int4", "int16", "uint8"])
def test_other_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=f"must be floating or int8, got {dtype}"):
        kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=jnp.dtype(dtype))


def kept(kind):
    """An empty cache of 8 slots, and what its arrays hold once `tokens` numbers are put behind `first` older ones."""
    if kind == "latent":
        put = lambda cache, new, ctx: cache.extend(new[:, :, 0], ctx)
        return LatentCache(jnp.zeros((B, 8, H))), put
    bounds = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), T, jnp.int32)
    dtype = jnp.int8 if kind == "int8" else jnp.float32
    cache = kv_cache(B, 8, num_kv_heads=K, k_dim=H, v_dim=H, ring=None, dtype=dtype)
    return cache, lambda cache, new, ctx: cache.extend(new, new, ctx, *bounds)[0]


@pytest.mark.parametrize("kind", ["float32", "int8", "latent"])
def test_what_does_not_fit_is_dropped_and_covers_nothing(kind):
    """Rows of 6 and 8 tokens of 8: two and none of three new ones fit. The older ones stay as they are."""
    empty, put = kept(kind)
    place = lambda length, valid=None: nn.make_context(
        B, T, cache=nn.cache.Cache(None, jnp.asarray(length)), valid=valid
    )
    number = lambda *values: jnp.broadcast_to(jnp.asarray(values, jnp.float32)[None, :, None, None], (B, T, K, H))

    @jax.jit
    def filled(cache):
        cache = put(cache, number(1, 2, 3), place([0, 0]))
        cache = put(cache, number(4, 5, 6), place([3, 3]))
        full = put(cache, number(7, 8, 0), place([6, 5]))
        chunk = put(full, number(9, 10, 11), place([6, 8], jnp.asarray([[True, True, False], [False] * 3])))
        return full, chunk, put(full, number(9, 10, 11), place([12, 7]))

    def slots(cache):
        array = cache.latent if kind == "latent" else cache.values.k * cache.scales.k if kind == "int8" else cache.k
        array = np.asarray(array)[:, None] if kind == "latent" else np.asarray(array)  # [B, K, 8, H]
        return array[:, 0, :, 0].round()  # int8 is near

    full, chunk, past = map(slots, filled(empty))
    np.testing.assert_array_equal(full, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 7, 8, 0]])
    np.testing.assert_array_equal(chunk, [[1, 2, 3, 4, 5, 6, 9, 10], [1, 2, 3, 4, 5, 7, 8, 0]])
    np.testing.assert_array_equal(past, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 7, 8, 9]])


def test_lengths_that_are_known_are_checked():
    layers = [kept("int8")[0], kv_cache(B, 12, num_kv_heads=K, k_dim=H, v_dim=H, ring=4, dtype=jnp.float32)]
    of = lambda *length, layers=layers: nn.cache.Cache(layers, jnp.asarray(length))
    assert of(0, 0).capacity == 8 and of(0, 0, layers=layers[1:]).capacity is None
    with pytest.raises(ValueError, match="a row of 9 tokens, cached and new ones, does not fit a cache of capacity 8"):
        nn.make_context(B, T, cache=of(0, 6))
    nn.make_context(B, T, cache=of(0, 6), valid=jnp.asarray([[True] * 3, [True, True, False]]))  # what is real fits
    jax.eval_shape(lambda cache: nn.make_context(B, T, cache=cache), of(0, 6))


def test_padding_on_the_left_is_refused_with_a_cache():
    """Token t is stored t slots after the cached ones, wherever padding stands."""
    left = jnp.asarray([[False, True, True], [True] * 3])
    with pytest.raises(ValueError, match="with a cache, padding must come after a row's tokens"):
        nn.make_context(B, T, cache=nn.cache.Cache(None, jnp.zeros(B, jnp.int32)), valid=left)
    nn.make_context(B, T, valid=left)


WINDOW, CHUNK = ops.Causal() & ops.SlidingWindow(5), ops.Causal() & ops.Chunked(5)


def with_cache(mask, tokens, dtype="float32", spare=0):
    """Keys, values and bounds of `tokens` new tokens (the last of row 1 is padding) after 0, 2 and 7 cached ones in a
    cache of 12, and the mask's description.
    """
    ring = mask.ring if mask.ring and mask.ring < 12 else None
    before, valid = (jnp.asarray(np.arange(n) < np.array(real)[:, None]) for n, real in (
        (7, (0, 2, 7)), (tokens, (tokens, max(1, tokens - 1), tokens))
    ))  # fmt: skip
    first, then = (jnp.asarray(length, jnp.int32) for length in ([0, 0, 0], [0, 2, 7]))
    new = lambda seed, size: jnp.asarray(np.random.default_rng(seed).normal(size=(3, size, 1, 8)), jnp.float32)
    static = []

    @jax.jit
    def run():
        cache = kv_cache(3, 12, num_kv_heads=1, k_dim=8, v_dim=8, ring=ring, dtype=jnp.dtype(dtype))
        cache = make_rewindable(cache, spare)
        ctx = nn.make_context(3, 7, cache=nn.cache.Cache(None, first), valid=before)
        cache, *_ = cache.extend(new(0, 7), new(1, 7), ctx, *ctx.key_intervals(mask))
        ctx = nn.make_context(3, tokens, cache=nn.cache.Cache(None, then), valid=valid)
        hint = ctx.mask_hint(mask, cache)
        static.append(hint.static)
        _, *seen = cache.extend(new(2, tokens), new(3, tokens), ctx, *ctx.key_intervals(mask))
        return seen, hint.segment_ids

    seen, ids = run()
    return seen, ops.MaskHint(static[0], ids)


# By default rings and full caches in one token with and without spare slots, and several; masks do not know how keys
# are stored.
CAUSAL, BLOCKS = ops.Causal(), CHUNK | ops.BidirectionalBlocks()
BY_DEFAULT = [
    (CAUSAL, "int8", 1, 2),
    *((WINDOW, *call) for call in (("float32", 1, 0), ("int8", 1, 2), ("float32", 5, 0))),
    (CHUNK, "float32", 1, 0),
    (CHUNK, "float32", 5, 0),
    (BLOCKS, "float32", 5, 0),
]
CALLS = [
    pytest.param(*call, marks=() if call in BY_DEFAULT else pytest.mark.full)
    for call in itertools.product((CAUSAL, WINDOW, CHUNK, BLOCKS), ("float32", "int8"), (1, 5), (0, 2))
]


@pytest.mark.parametrize(("mask", "dtype", "tokens", "spare"), CALLS, ids=str)
def test_the_description_of_a_mask_agrees_with_its_intervals_in_every_cache(mask, dtype, tokens, spare):
    """Empty slots and other chunks are other segments; one token attends to the slots of a ring from 0."""
    (keys, _, *bounds), (static, ids) = with_cache(mask, tokens, dtype, spare)
    is_ring_step = mask.ring is not None and tokens == 1
    key, (start, end) = np.arange(keys.shape[1]), (np.asarray(x)[..., None] for x in bounds)
    want = (start <= key) & (key < end)
    has_keys = want.any(axis=-1, keepdims=True)
    assert has_keys.sum() == 3 * tokens - (tokens > 1)
    assert static.kind == "causal" and not static.aligned
    assert static.segmented == (mask.ring is not None and not (is_ring_step and not spare)) == (ids is not None)
    seen = (key < end) & (key >= end - (static.window or 99))
    if ids is not None:
        queries, of_keys = map(np.asarray, ids)
        seen &= queries[:, :, None] == of_keys[:, None]
    np.testing.assert_array_equal(seen & has_keys, want)


@pytest.mark.full
@pytest.mark.parametrize("mask", [WINDOW, CHUNK], ids=str)
def test_the_kernel_of_tpus_prefills_a_ring(mask):
    (keys, values, start, end), hint = with_cache(mask, 5)
    q = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5, 2, 8)), jnp.float32)
    options = {"k_start": start, "k_end": end, "scale": 0.5}
    got, _ = jax.jit(lambda *x: by_name(splash.splash, interpret=True)(*x, mask_hint=hint, **options))(q, keys, values)
    np.testing.assert_allclose(got, reference(q, keys, values, **options)[0], atol=1e-5)
