"""Linear layers, norms and MLPs against float64 formulas; their initial scale; summaries."""

import copy
import inspect
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from tests.nn.tiny import tiny_llama

X = jnp.asarray(np.random.default_rng(0).normal(1, 3, (2, 3, 8)), jnp.float32)


@jax.jit
def run(layer, x):
    return layer(x)


def value(variable):
    return np.asarray(variable[...], np.float64)


def test_einsum_and_its_bias():
    layer = nn.Einsum("...D,NHD->...NH", (2, 5, 8), ("heads", "head_dim", "embed"), bias=True, rngs=nnx.Rngs(0))
    layer.b[...] = jax.random.normal(jax.random.key(1), (2, 5))
    want = np.einsum("BTD,NHD->BTNH", np.asarray(X, np.float64), value(layer.w)) + value(layer.b)
    np.testing.assert_allclose(run(layer, X), want, atol=1e-5)
    np.testing.assert_allclose(run(layer, X[0, 0]), want[0, 0], atol=1e-5)
    assert layer.b.axes == ("heads", "head_dim")
    assert jax.eval_shape(layer, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("spec", "shape"), [("...D,FD->...F", (6, 8)), ("...D,NHD->...NH", (2, 5, 8)), ("...D,D->...", (8,))]
)
def test_on_a_cpu_a_weights_gradient_sums_over_one_axis_of_rows(spec, shape):
    weights, rest = nn.partition(
        nn.Einsum(spec, shape, ("heads", "head_dim", "embed")[-len(shape) :], rngs=nnx.Rngs(0))
    )
    gradient = lambda multiply: jax.grad(lambda weights: jnp.sum(jnp.sin(multiply(weights))))
    layer = jax.jit(gradient(lambda weights: nn.combine(weights, rest)(X)))
    plain = jax.jit(gradient(lambda weights: jnp.einsum(spec, X, weights["w"])))
    np.testing.assert_allclose(layer(weights)["w"], plain(weights)["w"], rtol=1e-5, atol=1e-5)
    # The plain product sums over two axes, batch and sequence: XLA transposes copies of its operands.
    text = lambda gradient: gradient.lower(weights).as_text()
    assert "contracting_dims = [0, 1]" in text(plain)
    assert "contracting_dims = [0, 1]" not in text(layer)


@pytest.mark.parametrize(
    "layer",
    [
        lambda rngs: nn.GatedMLP(8, 12, rngs=rngs),
        lambda rngs: nn.Attention(8, num_heads=2, num_kv_heads=2, head_dim=6, rngs=rngs),
        lambda rngs: nn.GatedDeltaNet(8, num_heads=2, key_dim=6, value_dim=6, rngs=rngs),
        lambda rngs: nn.KimiDeltaAttention(8, num_heads=2, head_dim=6, rngs=rngs),
    ],
)
def test_on_a_cpu_projections_share_one_copy_of_their_rows(layer):
    # A loop over layers keeps each copy for the backward pass.
    program = str(jax.make_jaxpr(lambda x: jax.tree.leaves(layer(nnx.Rngs(0))(x))[0])(X))
    assert program.count("new_sizes=(6, 8)") == 1


@pytest.mark.parametrize(
    ("spec", "shape", "fan_in"),
    [("...D,FD->...F", (64, 256), 256), ("...NH,DNH->...D", (64, 16, 32), 512), ("...D,NHD->...NH", (16, 32, 64), 64)],
)
def test_initial_variance_is_one_over_fan_in(spec, shape, fan_in):
    w = nn.Einsum(spec, shape, ("heads", "head_dim", "embed")[: len(shape)], rngs=nnx.Rngs(0)).w[...]
    assert abs(float(jnp.std(w)) * fan_in**0.5 - 1) < 0.03


def test_einsum_describes_every_dimension():
    with pytest.raises(ValueError, match="one letter, size and axis name per dimension of w"):
        nn.Einsum("...D,FD->...F", (4, 8), ("mlp",), rngs=nnx.Rngs(0))


def test_einsum_refuses_another_width_also_where_the_weight_has_no_other_axis():
    layer = nn.Einsum("...D,D->...", (8,), ("embed",), rngs=nnx.Rngs(0))
    assert layer(X).shape == X.shape[:-1]
    with pytest.raises(ValueError, match=r"the weight of '\.\.\.D,D->\.\.\.'"):
        layer(X[..., :5])


def test_a_misspelt_axis_is_named_where_the_layer_is_built():
    with pytest.raises(
        ValueError, match=r"Einsum\('...D,FD->...F'\): no axis is named 'embde'; did you mean 'embed'\?"
    ):
        nn.Einsum("...D,FD->...F", (4, 8), ("mlp", "embde"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"ExpertLinear: no axis is named 'mpl'; did you mean 'mlp'\?"):
        nn.ExpertLinear(2, (4, 8), ("mpl", "expert_embed"), rngs=nnx.Rngs(0))


def test_embedding_and_its_logits():
    embed = nn.Embed(11, 8, rngs=nnx.Rngs(0))
    ids = jnp.array([[1, 10, 0]])
    np.testing.assert_array_equal(embed(ids, dtype=jnp.float32)[0], embed.w[...][ids[0]])
    assert embed(ids).dtype == jnp.bfloat16
    logits = jax.jit(lambda embed, x: embed.logits(x))(embed, X.astype(jnp.bfloat16))
    assert logits.dtype == jnp.float32
    want = np.asarray(X.astype(jnp.bfloat16), np.float64) @ np.asarray(embed.w[...].astype(jnp.bfloat16), np.float64).T
    np.testing.assert_allclose(logits, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(plus_one):
    norm = nn.RMSNorm(8, eps=1e-3, plus_one=plus_one)
    assert float(norm.scale[...].sum()) == (0 if plus_one else 8)
    norm.scale[...] = jax.random.normal(jax.random.key(2), (8,))
    x = np.asarray(X, np.float64)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (value(norm.scale) + plus_one)
    np.testing.assert_allclose(run(norm, X), want, atol=1e-5)
    assert jax.eval_shape(norm, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rms_norm_without_a_weight():
    x = np.asarray(X, np.float64)
    norm = nn.norm.UnitRMSNorm(eps=1e-3)
    np.testing.assert_allclose(jax.jit(norm)(X), x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3), atol=1e-5)
    assert jax.eval_shape(norm, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    small = X.astype(jnp.bfloat16) * 1e-20  # squares that bfloat16 holds and that are nothing beside epsilon
    assert np.abs(np.asarray(jax.jit(norm)(small), np.float32)).max() < 1e-15


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias):
    norm = nn.LayerNorm(8, bias=bias)
    norm.scale[...] = jax.random.normal(jax.random.key(2), (8,))
    shift = 0.0
    if bias:
        norm.bias[...] = jax.random.normal(jax.random.key(3), (8,))
        shift = value(norm.bias)
    x = np.asarray(X, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * value(norm.scale) + shift
    np.testing.assert_allclose(run(norm, X), want, atol=1e-5)


NARROW = jnp.zeros((1, 2, 6))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.Attention(8, num_heads=2, head_dim=4, rngs=nnx.Rngs(0)),
            "D=8 for the weight of '...D,NHD->...NH', got D=6",
        ),
        (
            nn.Attention(8, num_heads=2, head_dim=4, rngs=nnx.Rngs(0)).o,
            "N=2, H=4 for the weight of '...NH,DNH->...D', got N=2, H=6",
        ),
        (nn.Embed(3, 8, rngs=nnx.Rngs(0)).logits, "D=8 for the embedding, got D=6"),
        (nn.RMSNorm(8), "D=8 for the norm, got D=6"),
        (nn.LayerNorm(8), "D=8 for the norm, got D=6"),
    ],
)
def test_another_width_is_refused(layer, message):
    with pytest.raises(ValueError, match=re.escape(f"must be {message}")):
        layer(NARROW)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (jnp.zeros(5, jnp.int32), r"int32 of shape \(5,\)"),
        (np.zeros((2, 5), np.float32), r"float32 of shape \(2, 5\)"),
    ],
    ids=["one row", "floats"],
)
def test_tokens_that_are_no_rows_of_ids_are_refused(tokens, got):
    embed = inspect.unwrap(nn.Decoder.embed_inputs)  # without the annotations' check, which users do not have
    with pytest.raises(ValueError, match=f"tokens must be an array of integers.*got {got}"):
        embed(None, tokens, dtype=jnp.float32)


def test_inputs_of_another_shape_than_the_tokens_are_refused():
    for name, dtype in (("positions", int), ("segment_ids", int), ("valid", bool)):
        with pytest.raises(ValueError, match=rf"{name} must have the shape of the tokens, \(2, 5\), got \(5, 2\)"):
            nn.make_context(2, 5, **{name: jnp.zeros((5, 2), dtype)})
    cache = nn.cache.Cache([], jnp.zeros(3, jnp.int32), 8)
    with pytest.raises(ValueError, match="as many rows as the tokens, 2, got 3"):
        nn.make_context(2, 5, cache=cache)


def test_gradients_of_rows_add_up_in_bfloat16():
    """There, ones that are added to 256 change nothing."""
    ids, rngs = jnp.zeros((1, 1000), jnp.int32), nnx.Rngs(0)
    calls = [
        (nn.Embed(9, 1, rngs=rngs), lambda embed: embed(ids)),
        (nn.LearnedPositions(9, 1, rngs=rngs), lambda positions: positions.rows(ids)),
        (nn.RelativeBias(1, rngs=rngs), lambda bias: bias(ids, ids[0, :1])),
    ]
    for module, call in calls:
        trainable, rest = nn.partition(nn.tree.cast(module, jnp.bfloat16))
        gradient = jax.jit(jax.grad(lambda w: call(nn.combine(w, rest)).astype(jnp.float32).sum()))  # noqa: B023
        assert gradient(trainable)["w"][0, 0] == 1000
    counts = jnp.array([1000] + [0] * 8)
    gradient = jax.jit(jax.grad(lambda b: ops.add_expert_bias(jnp.zeros((1000, 1), b.dtype), b, counts).sum()))
    assert gradient(jnp.zeros((9, 1), jnp.bfloat16))[0, 0] == 1000


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_layers_are_copied_and_pickled_with_their_functions(copied):
    layer = nnx.List([nn.GatedMLP(4, 8, rngs=nnx.Rngs(0)), nn.MLP(4, 8, act=jax.nn.relu, rngs=nnx.Rngs(0))])
    chex.assert_trees_all_equal(copied(layer), layer)  # of one structure


def test_mlps():
    gated = nn.GatedMLP(8, 12, rngs=nnx.Rngs(0))
    x = np.asarray(X, np.float64)
    g, u = x @ value(gated.gate.w).T, x @ value(gated.up.w).T
    np.testing.assert_allclose(run(gated, X), (g / (1 + np.exp(-g)) * u) @ value(gated.down.w).T, atol=1e-4)
    plain = nn.MLP(8, 12, act=jax.nn.relu, rngs=nnx.Rngs(0))
    plain.up.b[...] = jnp.arange(12.0)
    h = np.maximum(x @ value(plain.up.w).T + np.arange(12), 0)
    np.testing.assert_allclose(run(plain, X), h @ value(plain.down.w).T, rtol=1e-4, atol=1e-4)


def test_summary_counts_what_is_there():
    model = jax.eval_shape(tiny_llama)
    text = nn.summary(model)
    assert f"{nn.num_parameters(model) / 1000:.4g} k" in text
    assert "5 x 4 12 32" in text and "layers.attn.q.w" in text and "heads head_dim embed" in text
    assert nn.summary(jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), model)) == text


@pytest.mark.parametrize(
    ("spec", "x", "w"),
    [
        ("...NH,DNH->...D", (2, 7, 3, 4), (5, 3, 4)),
        ("...NH,NHD->...D", (2, 3, 4), (3, 4, 5)),
        ("IaC,aCD->ID", (2, 3, 4), (3, 4, 5)),
    ],
)
def test_einsum_computes_its_spec(spec, x, w):
    layer = nn.Einsum(spec, w, ("heads", "head_dim", "embed"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), x)
    want = np.einsum(spec, np.asarray(x, np.float64), value(layer.w))
    np.testing.assert_allclose(run(layer, x), want, atol=1e-5)


def test_a_row_without_a_second_text_has_no_vector_of_it():
    head = nn.EmbeddingHead(4, dense=(3,), bias=True, rngs=nnx.Rngs(0))
    head.dense[0].b[...] += 1.0
    embed = jax.jit(lambda head, x, ids: head.embed(x, segment_ids=ids, texts=2)[0])
    first, second = np.asarray(embed(head, np.ones((1, 2, 4), np.float32), np.ones((1, 2), np.int32)))
    assert first.any() and not second.any()
