"""Cross-attention and position biases against the formulas, packed, padded, cached and on eight devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding
from tests.training.tiny import QUICKLY

B, T, S, D, N, H = 2, 6, 7, 16, 4, 8


def arrays(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def run(layer, x, cache=None, **context):
    """The layer's results and cache; `context` has the arrays of `nn.make_context`."""
    return layer(x, nn.make_context(*x.shape[:2], **context), cache)


@pytest.fixture(scope="module")
def cross():
    sizes = {"num_heads": N, "num_kv_heads": 2, "head_dim": H, "source_dim": 12}
    return jax.jit(lambda: nn.CrossAttention(D, **sizes, bias=True, rngs=nnx.Rngs(0)))()


def formula(layer, x, source):
    """One document, in float64."""
    w = {name: np.asarray(getattr(layer, name).w[...], np.float64) for name in "qkvo"}
    q = np.einsum("TD,NHD->TNH", x, w["q"])
    k, v = (np.repeat(np.einsum("SD,KHD->SKH", source, w[name]), 2, axis=1) for name in "kv")
    scores = np.einsum("TNH,SNH->NTS", q, k) / math.sqrt(H)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("NTS,SNH,DNH->TD", p / p.sum(-1, keepdims=True), v, w["o"])


def test_documents_attend_to_their_own_source(cross):
    """Packed and padded on both sides, in different places."""
    x, source = arrays(1, 9, D), arrays(1, 11, 12, seed=1)
    ids, source_ids = np.array([[0, 1, 1, 1, 2, 2, 3, 0, 0]]), np.array([[1, 1, 0, 2, 2, 2, 2, 0, 3, 3, 0]])
    context = {"segment_ids": jnp.asarray(ids), "encoded": nn.Encoded(jnp.asarray(source), jnp.asarray(source_ids))}
    got, _ = run(cross, x, **context)
    for document in (1, 2, 3):
        want = formula(cross, x[ids == document], source[source_ids == document])
        np.testing.assert_allclose(got[ids == document], want, atol=1e-5)
    start, end = jax.jit(lambda context: nn.make_context(1, 9, **context).encoded_interval)(context)
    assert (np.diff(start) >= 0).all() and (np.diff(end) >= 0).all()  # transposed intervals exist
    assert (start == end)[ids == 0].all()


def test_cached_equals_uncached(cross):
    """Sources with padding on the left and on the right; after the first call only the cache is needed."""
    x, source = jnp.asarray(arrays(B, T, D)), jnp.asarray(arrays(B, S, 12, seed=1))
    encoded = nn.Encoded(source, jnp.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]))
    want, _ = run(cross, x, encoded=encoded)
    first, cache = run(cross, x[:, :4], cross.init_cache(B, T, jnp.float32), encoded=encoded)
    second, cache = run(cross, x[:, 4:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), want, atol=1e-5)
    np.testing.assert_allclose(want[0], formula(cross, x[0], source[0, 2:]), atol=1e-5)


def test_an_empty_cache_may_be_donated(cross):
    cache = cross.init_cache(2, 8)
    assert len({id(leaf) for leaf in jax.tree.leaves(cache)}) == 4


def test_eight_devices_equal_one(cross):
    """Over rows, and over the tokens of both sequences; this one's length does not divide."""
    x, source = jnp.asarray(arrays(4, 8, D)), jnp.asarray(arrays(4, 7, 12, seed=1))
    encoded = nn.Encoded(source)
    want, _ = run(cross, x, encoded=encoded)
    for strategy in (sharding.FSDP_TP, sharding.FSDP | sharding.CP_GATHER, sharding.FSDP | sharding.CP_RING):
        axis = "tensor" if strategy == sharding.FSDP_TP else "context"
        with sharding.use(sharding.Layout(sharding.make_mesh(data=2, fsdp=2, **{axis: 2}), strategy)):
            np.testing.assert_allclose(run(cross, x, encoded=encoded)[0], want, atol=1e-5)


def test_missing_and_wrong_outputs_of_an_encoder_are_named(cross):
    x = np.ones((B, T, D), np.float32)
    for cache in (None, cross.init_cache(B, T)):
        with pytest.raises(ValueError, match="needs the output of an encoder"):
            jax.eval_shape(run, cross, x, cache)
    with pytest.raises(ValueError, match="source_dim=12, got 16"):
        jax.eval_shape(functools.partial(run, encoded=nn.Encoded(jnp.ones((B, S, D)))), cross, x)
    with pytest.raises(ValueError, match="a row for each of the 2 rows of tokens, got 3"):
        nn.make_context(B, T, encoded=nn.Encoded(jnp.ones((3, S, 12))))
    with pytest.raises(ValueError, match="both sides"):
        nn.make_context(B, T, segment_ids=jnp.ones((B, T), int), encoded=nn.Encoded(jnp.ones((B, S, 12))))


def test_sources_that_do_not_fit_are_named():
    tokens, ids = np.zeros((2, 4), np.int32), np.zeros((2, 5), np.int32)
    for source, message in [
        (nn.Source(ids[:1]), "each of the 2 rows"),
        (nn.Source(ids, valid=ids[:, :3] == 0), "shape of source.tokens"),
        (nn.Source(ids, segment_ids=np.array([[2, 2, 1, 1, 0]] * 2)), "must increase"),
    ]:
        with pytest.raises(ValueError, match=message):
            nn.check_source(tokens, source)
    with pytest.raises(TypeError, match="nn.Source"):
        nn.check_source(tokens, {"input_ids": ids})


@pytest.mark.parametrize("make", [lambda: nn.ALiBi(N), lambda: nn.RelativeBias(N, rngs=nnx.Rngs(0))])
def test_position_biases_are_added_to_the_scores(make):
    """Whole, packed and with a cache in rows of different lengths."""
    x, attn = jnp.asarray(arrays(B, T, D)), nn.Attention(D, num_heads=N, head_dim=H, rngs=nnx.Rngs(0))

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def results(attn, x):
        bias = make()
        full, _ = attn(x, nn.make_context(B, T, position_bias=bias))
        ids = jnp.repeat(jnp.array([[1, 2]]), T, 1)
        packed, _ = attn(x.reshape(1, -1, D), nn.make_context(1, B * T, segment_ids=ids, position_bias=bias))
        cache = nn.cache.Cache(attn.init_cache(B, T, jnp.float32), jnp.zeros(B, jnp.int32))
        valid = jnp.arange(4)[None] < jnp.array([[4], [2]])
        ctx = nn.make_context(B, 4, valid=valid, cache=cache, position_bias=bias)
        _, layer = attn(x[:, :4], ctx, cache.layers)
        cache = cache.advanced(layer, ctx)
        rest, _ = attn(jnp.stack([x[0, 4:], x[1, 2:4]]), nn.make_context(B, 2, cache=cache, position_bias=bias), layer)
        q, k, v = attn.project(x, nn.make_context(B, T))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H) + bias(jnp.arange(T)[None], jnp.arange(T))
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf))
        return full, attn.o(jnp.einsum("BNTS,BSNH->BTNH", p, v)), packed.reshape(B, T, D), rest

    full, want, packed, rest = results(attn, x)
    np.testing.assert_allclose(full, want, atol=1e-5)
    np.testing.assert_allclose(packed, full, atol=1e-5)
    np.testing.assert_allclose(rest[0], full[0, 4:], atol=1e-5)
    np.testing.assert_allclose(rest[1], full[1, 2:4], atol=1e-5)


@pytest.mark.full
def test_buckets_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    torch = pytest.importorskip("torch")
    offset = np.arange(-300, 301)
    for both in (False, True):
        ours = nn.RelativeBias(1, bidirectional=both, rngs=nnx.Rngs(0))._buckets(jnp.asarray(offset)[None, None])
        theirs = modeling.T5Attention._relative_position_bucket(torch.from_numpy(offset), bidirectional=both)
        np.testing.assert_array_equal(ours[0, 0], theirs.numpy())


@pytest.mark.parametrize(
    "options", [{"max_distance": 16}, {"num_buckets": 1}, {"num_buckets": 3, "bidirectional": True}]
)
def test_buckets_need_distances(options):
    with pytest.raises(ValueError, match="at least 1 and below max_distance"):
        nn.RelativeBias(1, **options, rngs=nnx.Rngs(0))


def test_slopes_of_alibi_are_those_of_the_paper():
    assert nn.ALiBi(8).slopes == [2**-i for i in range(1, 9)]


@pytest.mark.full
def test_slopes_of_alibi_are_those_of_transformers():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    torch = pytest.importorskip("torch")
    for heads in (4, 6, 8):
        alibi = bloom.build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)  # slope * index of the key
        np.testing.assert_allclose(nn.ALiBi(heads).slopes, alibi[:, 0, 1], rtol=1e-6)


def test_layers_that_would_leave_out_a_bias_refuse_it():
    shared = nn.SharedKVAttention(D, num_heads=N, num_kv_heads=N, head_dim=H, rngs=nnx.Rngs(0))
    stack = nn.Stack(lambda _, rngs: shared, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="SharedKVAttention does not add a position bias"):
        stack(jnp.ones((B, T, D)), nn.make_context(B, T, position_bias=nn.ALiBi(N)))


@pytest.mark.full
def test_sinusoidal_positions_are_those_of_the_papers():
    whisper = pytest.importorskip("transformers.models.whisper.modeling_whisper")
    ours = nn.SinusoidalPositions(8, last_included=True).vectors(jnp.arange(50))
    np.testing.assert_allclose(ours, whisper.sinusoids(50, 8), atol=1e-5)
    ctx = nn.make_context(1, 3)
    pair = nn.SinusoidalPositions(8, interleaved=True)(ctx, dtype=jnp.float32)[0, 2, 2:4]  # at 2 / 10000^(2 / 8)
    np.testing.assert_allclose(pair, [math.sin(2 / 10), math.cos(2 / 10)], atol=1e-6)


def test_local_windows_reach_to_both_sides():
    tokens = ops.TokenPositions(jnp.arange(8)[None], jnp.zeros((1, 8), jnp.int32), jnp.full((1, 8), 8))
    start, end = ops.LocalWindow(2).interval(tokens)
    np.testing.assert_array_equal(start[0], [0, 0, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(end[0], [3, 4, 5, 6, 7, 8, 8, 8])
