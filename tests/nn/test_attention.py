"""The attention layer against a float64 formula, and its caches against the full forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops

MASKS = {
    "causal": ops.Causal(),
    "window": ops.Causal() & ops.SlidingWindow(5),
    "chunked": ops.Causal() & ops.Chunked(4),
    "both": ops.Causal() & ops.SlidingWindow(3) & ops.Chunked(4),
    "prefix": ops.Causal() | ops.Prefix(3),
}


def few(*names):
    """These masks by default, the others in the full run."""
    marks = lambda name: () if name in names else pytest.mark.full
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in MASKS])


def build(mask=ops.Causal(), **options):
    kwargs = dict(num_heads=4, num_kv_heads=2, head_dim=6, mask=mask, rope=ops.Rope(6), rngs=nnx.Rngs(0)) | options
    return nn.Attention(16, **kwargs)


def inputs(batch=2, seq=11, dim=16):
    return np.random.default_rng(1).normal(size=(batch, seq, dim)).astype(np.float32)


@jax.jit
def run(layer, x, **context):
    """The layer's results; `context` has the arrays of `nn.make_context`."""
    return layer(x, nn.make_context(*x.shape[:2], **context) if context else None)[0]


@jax.jit
def extend(layer, x, cache, length, valid=None):
    """Results and the new cache, of which `length` tokens of each row are there before."""
    return layer(x, nn.make_context(*x.shape[:2], valid=valid, cache=nn.cache.Cache([cache], length)), cache)


def visible(name, i, j):
    return {
        "causal": j <= i,
        "window": i - 5 < j <= i,
        "chunked": j <= i and j // 4 == i // 4,
        "both": i - 3 < j <= i and j // 4 == i // 4,
        "prefix": j <= i or (i < 3 and j < 3),
    }[name]


def formula(layer, x, name, scale=None, softcap=None):
    """Attention in float64, head by head."""
    get = lambda m: np.asarray(m.w[...], np.float64)
    bias = lambda m: 0 if m.b is None else np.asarray(m.b[...], np.float64)
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("BTD,NHD->BTNH", x, get(m)) + bias(m) for m in (layer.q, layer.k, layer.v))
    if layer.rope is not None:
        q, k = rotate(q), rotate(k)
    T, N, K = x.shape[1], q.shape[2], k.shape[2]
    out = np.zeros(q.shape)
    see = np.array([[visible(name, i, j) for j in range(T)] for i in range(T)])
    for n in range(N):
        s = np.einsum("BTH,BSH->BTS", q[:, :, n], k[:, :, n * K // N]) * (scale or q.shape[-1] ** -0.5)
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        sink = 0.0 if layer.sinks is None else np.exp(np.asarray(layer.sinks[...], np.float64))[n]
        e = np.exp(s) * see
        out[:, :, n] = np.einsum("BTS,BSH->BTH", e / (e.sum(-1, keepdims=True) + sink), v[:, :, n * K // N])
    return np.einsum("BTNH,DNH->BTD", out, get(layer.o)) + bias(layer.o)


def rotate(x):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize("name", MASKS)
def test_masks_against_formula(name):
    layer = build(MASKS[name])
    np.testing.assert_allclose(run(layer, inputs()), formula(layer, inputs(), name), atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_kv_heads=4),
        dict(num_kv_heads=1),
        dict(rope=None),
        dict(scale=0.3, softcap=2.0),
        dict(bias=True, out_bias=True, sinks=True),
    ],
    ids=str,
)
def test_features_against_formula(options):
    layer = build(**options)
    for i, part in enumerate((layer.q, layer.k, layer.v, layer.o)):
        if part.b is not None:
            part.b[...] = np.random.default_rng(i).normal(size=part.b.shape).astype(np.float32)
    if layer.sinks is not None:
        layer.sinks[...] = np.arange(4, dtype=np.float32)
    want = formula(layer, inputs(), "causal", options.get("scale"), options.get("softcap"))
    np.testing.assert_allclose(run(layer, inputs()), want, atol=3e-6)


def test_temperature_counts_within_documents():
    """Queries times `1 + scale log(1 + floor((i + 1) / floor))` are scores times the same, document by document."""
    tuning, segments = nn.TemperatureTuning(floor=3, scale=0.7), jnp.array([[1] * 4 + [2] * 7] * 2)
    index = np.concatenate([np.arange(4), np.arange(7)])
    want = 1 + 0.7 * np.log(1 + (index + 1) // 3)
    tuned, plain = build(rope=None, temperature=tuning), build(rope=None)
    queries = jax.jit(lambda layer, x: layer.project(x, nn.make_context(2, 11, segment_ids=segments))[0])
    got, q = queries(tuned, inputs()), queries(plain, inputs())
    np.testing.assert_allclose(got, q * want[None, :, None, None], rtol=1e-6)
    assert jax.eval_shape(queries, tuned, inputs().astype(jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(tuning(jnp.array([[0, 1]], jnp.int32)), 1.0)  # far from the first step


# A call of seven tokens is longer than every window.
SPLITS = [[7, 1, 1, 1, 1], [1, 1, 7, 1, 1], [1] * 11]


@few("both", "prefix")
def test_prefill_and_decode_equal_the_full_pass(name):
    layer, x = build(MASKS[name]), inputs()
    want, empty = run(layer, x), layer.init_cache(2, 16, jnp.float32)
    for chunks in SPLITS:
        if name == "prefix":  # a prefix is seen whole only where it comes in one call
            chunks = [max(chunks[0], 4), *[1] * (11 - max(chunks[0], 4))]
        cache, length, got = empty, 0, []
        for size in chunks:
            y, cache = extend(layer, x[:, length : length + size], cache, np.full(2, length, np.int32))
            got, length = [*got, y], length + size
        np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=2e-6, err_msg=str(chunks))


def test_a_prefix_in_several_calls_is_refused():
    """Outside jit by an error, inside by NaN in the rows that it concerns; a short row by itself is a whole one."""
    layer, x = build(MASKS["prefix"]), inputs(2, 4)
    valid = np.arange(2)[None] < np.array([[2], [0]])
    first, cache = extend(layer, x[:, :2], layer.init_cache(2, 16, jnp.float32), np.zeros(2, np.int32), valid)
    assert np.isfinite(first[0]).all()
    second, _ = extend(layer, x, cache, np.array([2, 0], np.int32))
    assert np.isnan(second[0]).all() and np.isfinite(second[1]).all()
    ctx = nn.make_context(2, 4, cache=nn.cache.Cache([cache], jnp.array([2, 0], jnp.int32)))
    with pytest.raises(ValueError, match=r"whole prefix of 3 tokens, .* but the rows have \[2, 0\] cached tokens"):
        layer(jnp.asarray(x), ctx, cache)


def test_windows_hold_a_ring():
    assert isinstance(build(MASKS["window"]).init_cache(1, 64), nn.cache.RingCache)
    assert build(MASKS["window"]).init_cache(1, 64).k.shape == (1, 2, 5, 6)
    assert build(MASKS["chunked"]).init_cache(1, 64).k.shape == (1, 2, 4, 6)
    assert isinstance(build(MASKS["causal"]).init_cache(1, 64), nn.cache.KVCache)
    assert build(MASKS["window"]).init_cache(1, 3).k.shape == (1, 2, 3, 6)


@pytest.mark.parametrize("name", ["window", *(pytest.param(n, marks=pytest.mark.full) for n in ("causal", "chunked"))])
def test_rows_of_different_lengths_share_a_cache(name):
    """Right-padded prompts of 3 and 9 tokens, then decoding: each row equals itself alone."""
    layer, x = build(MASKS[name]), inputs()
    lengths = np.array([3, 9], np.int32)
    valid = np.arange(9)[None] < lengths[:, None]
    _, cache = extend(layer, x[:, :9], layer.init_cache(2, 16, jnp.float32), np.zeros(2, np.int32), valid)
    got, _ = extend(layer, x[[0, 1], lengths][:, None], cache, lengths)
    want = run(layer, x)
    np.testing.assert_allclose(got[0, 0], want[0, 3], atol=2e-6)
    np.testing.assert_allclose(got[1, 0], want[1, 9], atol=2e-6)


@few("both", "prefix")
def test_packed_documents_equal_separate_ones(name):
    layer, x = build(MASKS[name]), inputs(1, 11)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0]], np.int32)
    packed = np.asarray(run(layer, x, segment_ids=segments))
    for part in (slice(0, 4), slice(4, 9)):
        np.testing.assert_allclose(packed[:, part], run(layer, x[:, part]), atol=2e-6)
    np.testing.assert_array_equal(packed[:, 9:], 0)


@few("both")
def test_padding_changes_nothing(name):
    """To the left and to the right."""
    layer, x = build(MASKS[name]), inputs(2, 11)
    for real in (slice(3, 11), slice(0, 8)):
        valid = np.zeros((2, 11), bool)
        valid[:, real] = True
        padded = np.asarray(run(layer, x, valid=valid))
        np.testing.assert_allclose(padded[:, real], run(layer, x[:, real]), atol=2e-6)


def test_errors_say_what_must_hold():
    with pytest.raises(
        ValueError, match="num_heads must be a multiple of num_kv_heads, and both at least 1; got 4 and 3"
    ):
        build(num_kv_heads=3)
    with pytest.raises(ValueError, match="both at least 1; got 4 and 0"):
        build(num_kv_heads=0)
    with pytest.raises(ValueError, match="must not exceed head_dim"):
        build(rope=ops.Rope(8))
    with pytest.raises(ValueError, match="keys_as_values needs v_dim equal to head_dim, got 3 and 6"):
        build(keys_as_values=True, v_dim=3)
    cache = build().init_cache(1, 4, jnp.float32)
    with pytest.raises(ValueError, match="do not fit a cache of capacity 4"):
        extend(build(), inputs(1, 5), cache, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="segment_ids cannot be combined with a cache"):
        full = nn.cache.Cache([cache], jnp.zeros(1, jnp.int32))
        nn.make_context(1, 4, segment_ids=jnp.ones((1, 4), jnp.int32), cache=full)


def test_an_implementation_is_asked_for_by_name():
    x = inputs()
    asked, best = build(implementation="reference"), build()
    np.testing.assert_allclose(run(asked, x), run(best, x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="splash was requested, but it runs on tpu, not on cpu; chunked can run it"):
        run(build(implementation="splash"), x)


def test_with_attention_sets_every_layer_of_a_model_and_leaves_the_old_one():
    model = nn.Stack(lambda _, rngs: build(rngs=rngs), 3, rngs=nnx.Rngs(0))
    new = nn.with_attention(model, "splash")
    assert all(layer.implementation == "splash" for layer in new)
    assert all(layer.implementation is None for layer in model)
    assert all(a is b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(model), strict=True))
    assert jax.tree.structure(nn.with_attention(new, None)) == jax.tree.structure(model)
    with pytest.raises(ValueError, match=r"Einsum has no layer \(nn.SequenceMixer\) whose op is 'attention'"):
        nn.with_attention(build().q, "chunked")


WINDOW, IMAGES = ops.SlidingWindow(8), ops.BidirectionalBlocks()
LAYERS = {
    "Attention": functools.partial(nn.Attention, 24, num_heads=4, head_dim=6),
    "SharedKVAttention": functools.partial(nn.SharedKVAttention, 24, num_heads=4, num_kv_heads=2, head_dim=6),
    "MLA": functools.partial(nn.MLA, 24, num_heads=2, kv_rank=6, nope_dim=4, v_dim=4, rope=ops.Rope(4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_window_that_sees_the_future_is_refused(layer):
    make = lambda mask: jax.eval_shape(lambda: LAYERS[layer](mask=mask, rngs=nnx.Rngs(0)))
    for mask in (WINDOW, ops.Causal() | WINDOW, ops.Full() & WINDOW, (ops.Causal() & ops.Chunked(4)) | WINDOW):
        with pytest.raises(ValueError, match=r"lets a token attend to later ones.*write Causal\(\) & SlidingWindow"):
            make(mask)
    causal, prefix = ops.Causal() & WINDOW, ops.Causal() | ops.Prefix(3)
    for mask in (
        causal,
        (ops.Causal() | IMAGES) & WINDOW,
        causal | IMAGES,
        causal | ops.Prefix(3),
        prefix & WINDOW,
        ops.Full(),
    ):
        make(mask)
