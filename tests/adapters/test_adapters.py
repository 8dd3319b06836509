"""Adapters added to models: outputs, trainable parameters, and parameters that must not change."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, ops, post_training, quantization, training
from tests.nn.tiny import filled
from tests.quantization.tiny import Experts
from tests.quantization.tiny import model as filled_model
from tests.training import tiny

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) % 16
LORA = adapters.LoRA(rank=3, alpha=6)
loss = functools.partial(training.NextToken(), dtype=jnp.float32)


QUICKLY = {"xla_backend_optimization_level": "0"}
full = functools.partial(pytest.param, marks=pytest.mark.full)
jit = functools.partial(jax.jit, compiler_options=QUICKLY)


@functools.cache
def model(name):
    """With initial values: tolerances here are for logits of their size."""
    return filled_model(name) if name == "llama" else jit(lambda: Experts(name == "both", rngs=nnx.Rngs(0)))()


def mlps(dim=32):
    return filled(lambda: tiny.Bigram(dim, rngs=nnx.Rngs(0)))


def put_on(base, rules=LORA, seed=1):
    """Adds adapters in one program: op by op takes many times as long."""
    return _put(tuple(rules) if isinstance(rules, list) else rules, seed)(base)


@functools.cache
def _put(rules, seed):
    rules = list(rules) if isinstance(rules, tuple) else rules
    return jit(lambda base: adapters.add(base, rules, rngs=nnx.Rngs(seed)))


def trained(model, seed=2, size=0.3):
    """Gives every factor other values, as training would."""
    factors, rest = nn.partition(model, adapters.trainable)
    random = np.random.default_rng(seed)
    changed = {n: np.asarray(v) + size * random.normal(size=v.shape).astype(np.float32) for n, v in factors.items()}
    return nn.combine(jax.device_put(changed), rest)


def tuned(base, rules=LORA, *, seed=2, size=0.3):
    """Adds adapters whose values training might have given, without compiling."""
    model = jax.eval_shape(lambda base: adapters.add(base, rules, rngs=nnx.Rngs(0)), base)
    values, random = nn.variables(base), np.random.default_rng(seed)
    for path, variable in nn.variables(model).items():
        if adapters.trainable(path, variable):
            noise = size * random.standard_normal(variable.get_value().shape, np.float32)
            variable.set_value(jax.device_put(noise + path.endswith("magnitude")))
        else:
            variable.set_value(values[path].get_value())
    return model


@jax.jit
def logits(model, tokens=TOKENS):
    return model.logits(model(jnp.asarray(tokens), dtype=jnp.float32).hidden)


def close(got, want, atol=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), atol=atol, rtol=0)


def test_a_fresh_adapter_changes_nothing_and_comes_off_by_identity():
    base = tiny.model()
    adapted = adapters.add(base, LORA, rngs=nnx.Rngs(0))  # not under jit, which returns other arrays
    np.testing.assert_array_equal(logits(adapted), logits(base))
    again = adapters.base_model(adapted)
    assert jax.tree.structure(again) == jax.tree.structure(base)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(base), strict=True))


def einsum(spec, shape, axes, **options):
    return nnx.Dict(layer=nn.Einsum(spec, shape, axes, **options, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize(
    ("spec", "shape", "axes"),
    [
        ("...D,NHD->...NH", (2, 3, 4), ("heads", "head_dim", "embed")),
        ("...NH,DNH->...D", (4, 2, 3), ("embed", "heads", "head_dim")),
        ("...D,DF->...F", (4, 5), ("embed", "mlp")),
    ],
)
def test_the_formula_in_float64(spec, shape, axes, options):
    lora = adapters.LoRA(rank=2, alpha=3, **options)
    build = jit(lambda: adapters.add(einsum(spec, shape, axes, bias=True), lora, rngs=nnx.Rngs(1)))
    adapted = trained(build())
    layer = adapted["layer"]
    w, a, b = (np.asarray(v[...], np.float64) for v in (layer.w, layer.matmul.a, layer.matmul.b))
    letters, out = spec.partition(",")[2].split("->")
    kept, summed = ("".join(c for c in letters if (c in out) == keep) for keep in (True, False))
    scale = 3 / np.sqrt(2) if options.get("rslora") else 3 / 2
    w = w + scale * np.einsum(f"r{summed},{kept}r->{letters}", a, b)
    if options.get("dora"):
        length = np.sqrt((w**2).sum(axis=tuple(letters.index(c) for c in summed)))
        gain = np.asarray(layer.matmul.magnitude[...], np.float64) / length
        w = np.einsum(f"{letters},{kept}->{letters}", w, gain)
    x = np.random.default_rng(0).normal(size=(7, *(shape[letters.index(c)] for c in summed)))
    y, merged = jit(lambda model, x: (model["layer"](x), adapters.merge(model)["layer"].w[...]))(
        adapted, x.astype(np.float32)
    )
    close(y, np.einsum(spec.replace("...", "T"), x, w) + np.asarray(layer.b[...], np.float64), atol=1e-5)
    close(merged, w, atol=1e-5)


def test_doras_length_carries_no_gradient():
    lora = adapters.LoRA(rank=2, alpha=3, dora=True)
    build = jit(lambda: adapters.add(einsum("...D,FD->...F", (5, 4), ("mlp", "embed")), lora, rngs=nnx.Rngs(1)))
    layer = trained(build())["layer"]
    factors, rest = nn.partition(layer, adapters.trainable)
    through = lambda b: nn.combine(factors | {"matmul.b": b}, rest)(jnp.ones((1, 4))).sum()
    w, a, b, magnitude = map(
        np.asarray, (layer.w[...], *(factors[f"matmul.{name}"] for name in ("a", "b", "magnitude")))
    )
    gains = magnitude / np.linalg.norm(w + 1.5 * b @ a, axis=1)
    # Of the sum of gains * (w + 1.5 b a) x with x = 1, and the gains as constants.
    close(jit(jax.grad(through))(factors["matmul.b"]), 1.5 * gains[:, None] * a.sum(axis=1), atol=1e-6)


def test_a_dora_adapter_starts_as_the_base():
    adapted = put_on(tiny.model(), dataclasses.replace(LORA, dora=True))
    close(logits(adapted), logits(tiny.model()), atol=1e-5)


@pytest.mark.parametrize(
    ("format", "name"), [("nf4", "mlps"), *(full(format, "both") for format in ("nf4", "int8", "fp8", "int4"))]
)
def test_on_a_quantized_base(format, name):
    if format in ("nf4", "int4"):  # groups of 64 do not fit width 32
        format = quantization.Format(format, group=16)
    base = jit(lambda base: quantization.for_inference(base, format))(mlps() if name == "mlps" else model(name))
    adapted = put_on(base)
    np.testing.assert_array_equal(logits(adapted), logits(base))
    adapted = trained(adapted)
    merged = jit(adapters.merge)(adapted)
    assert not [v for v in jax.tree.leaves(merged) if v.dtype not in (jnp.float32, jnp.int32)]
    close(logits(merged), logits(adapted), atol=5e-5)


def test_a_trainer_without_a_filter_trains_factors_only():
    """Without this, the base moves, `save` drops its change, and `base` is a reference that moves."""
    adapted = tuned(jit(lambda base: quantization.for_inference(base, "int8"))(mlps()))
    factors = nn.partition(adapted, adapters.trainable)[0]
    trainer = training.Trainer(adapted, optax.sgd(0.1), tiny.Loader(), loss=loss)
    assert set(trainer.state.trainable) == set(factors) == {n for n in nn.variables(adapted) if ".matmul." in n}
    trainer.fit(2)
    before, after = (nn.variables(adapters.base_model(model)) for model in (adapted, trainer.model))
    assert all(np.array_equal(value.get_value(), after[path].get_value()) for path, value in before.items())
    moved = {n for n, value in trainer.state.trainable.items() if not np.array_equal(value, factors[n])}
    assert moved >= {n for n in factors if n.endswith(".b")}
    in_float = tuned(mlps())
    make = lambda model: training.make_state(model, optax.sgd(0.1), filter=nn.tree.is_trainable)
    assert set(jax.eval_shape(make, in_float).trainable) == set(nn.partition(in_float)[0]) > set(factors)


def test_rules_choose_layers_and_give_ranks():
    rules = [
        adapters.Rule(None, layers=(0,), match="layers.mlp*"),
        adapters.Rule(adapters.LoRA(2, 4), match="*.attn.[qv]"),
        adapters.Rule(adapters.LoRA(4, 4), kinds=("expert",)),
    ]
    adapted = put_on(filled_model("both"), rules)
    ranks = {(row.path.split(".", 2)[2], row.rank) for row in adapters.report(adapted).rows}
    assert {rank for path, rank in ranks if "attn" in path} == {2}
    assert isinstance(adapted.layers[1].mlp.up.matmul, nn.matmul.LowRank)
    assert isinstance(adapted.layers[0].mlp.up.matmul, nn.matmul.PlainMatmul)
    assert isinstance(adapted.layers[0].attn.k.matmul, nn.matmul.PlainMatmul)


def test_initial_values_do_not_depend_on_the_layout():
    scanned = put_on(tiny.model())
    alone = jit(lambda base: adapters.add(nn.unstack(base), LORA, rngs=nnx.Rngs(1)))(tiny.model())
    for layer, other in zip(scanned.layers, alone.layers, strict=True):
        np.testing.assert_array_equal(layer.mlp.up.matmul.a[...], other.mlp.up.matmul.a[...])
    a = scanned.layers[1].mlp.up.matmul.a[...]
    assert np.abs(a).max() <= 1 / np.sqrt(a.shape[-1]) and np.std(a) > 0.4 / np.sqrt(a.shape[-1])
    assert not np.array_equal(a, scanned.layers[2].mlp.up.matmul.a[...])


def test_inside_jit_and_on_shapes():
    base = tiny.model()
    add = lambda base: adapters.add(base, LORA, rngs=nnx.Rngs(1))
    eager, made, shapes = add(base), put_on(base), add(jax.eval_shape(lambda: base))
    for leaf, other, shape in zip(*map(jax.tree.leaves, (eager, made, shapes)), strict=True):
        close(leaf, other, atol=1e-6)
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    assert nn.tree.axes(eager) == nn.tree.axes(made) == nn.tree.axes(shapes)


@pytest.mark.parametrize("base", [tiny.model, full(lambda: model("both"))], ids=["mlps", "both"])
def test_a_new_adapter_on_a_frozen_one(base):
    first = tuned(base())
    below = adapters.freeze(first)
    second = put_on(below, adapters.LoRA(2, 2), seed=5)
    close(logits(second), logits(first), atol=1e-6)
    assert len(nn.partition(second, adapters.trainable)[0]) == len(nn.partition(first, adapters.trainable)[0])
    second = trained(second, seed=9)
    np.testing.assert_array_equal(logits(adapters.base_model(second)), logits(below))
    close(logits(jit(adapters.merge)(second)), logits(second))


def test_decoding_with_latent_attention_uses_the_adapters():
    sizes = {"num_heads": 2, "kv_rank": 6, "nope_dim": 4, "v_dim": 5, "q_rank": 7}
    base = lambda: nnx.Dict(layer=nn.MLA(16, **sizes, rope=ops.Rope(4), rngs=nnx.Rngs(0)))
    lora = dataclasses.replace(LORA, dora=True)
    layer = trained(jit(lambda: adapters.add(base(), lora, rngs=nnx.Rngs(1)))())["layer"]
    x = np.random.default_rng(0).standard_normal((2, 6, 16), np.float32)

    @jit
    def both(layer, x):
        cache = layer.init_cache(2, 8, jnp.float32)
        start = nn.cache.Cache((cache,), jnp.zeros(2, jnp.int32))
        ctx = nn.make_context(2, 5, cache=start)
        _, cache = layer(x[:, :5], ctx, cache)
        ctx = nn.make_context(2, 1, cache=start.advanced((cache,), ctx))
        return layer(x[:, 5:], ctx, cache)[0][:, 0], layer(x)[0][:, -1]

    close(*both(layer, x))


def test_experts_equal_their_merged_loop():
    def build():
        router = nn.Router(16, 4, top_k=2, rngs=nnx.Rngs(3))
        moe = nn.MoE(16, 8, router=router, weight_order="EIO", rngs=nnx.Rngs(0))
        return adapters.add(moe, adapters.LoRA(2, 4, dora=True), rngs=nnx.Rngs(1))

    fresh = jit(build)()
    lengths = np.linalg.norm(fresh.up.w[...], axis=1)  # of [expert, input, output]
    np.testing.assert_allclose(np.ravel(fresh.up.matmul.magnitude[...]), np.ravel(lengths), rtol=1e-5)
    adapted = trained(fresh)
    x = np.random.default_rng(0).standard_normal((2, 8, 16), np.float32)
    y, merged, loop = jit(lambda m, x: (m(x)[0], adapters.merge(m)(x)[0], m.reference(x)))(adapted, x)
    close(y, merged)
    close(y, loop)


def test_bad_rules():
    base = jax.eval_shape(lambda model: model, model("both"))
    put_on = lambda base, rules=LORA: adapters.add(base, rules, rngs=nnx.Rngs(0))
    for match in ("layers.attn.qq", "*.q_proj", "model.layers.0.self_attn.q_proj", "q"):
        with pytest.raises(ValueError, match=rf"match no matmul.*{re.escape(match)}.*Did you mean layers\.attn\.q\b"):
            put_on(base, [adapters.Rule(LORA, match=match)])
    with pytest.raises(ValueError, match="embed is of the kind 'embedding', which is not one of the rule's kinds"):
        put_on(base, [adapters.Rule(LORA, match="embed")])
    with pytest.raises(ValueError, match=r"names the layers \[9\]"):
        put_on(base, [adapters.Rule(LORA, layers=(0, 9))])
    with pytest.raises(ValueError, match="embeddings and heads have no matmul"):
        put_on(base, [adapters.Rule(LORA, kinds=("embedding",))])
    with pytest.raises(ValueError, match="no trainable adapters to remove"):
        adapters.base_model(base)
    with pytest.raises(ValueError, match="assign an adapter"):
        put_on(base, [adapters.Rule(None)])
    with pytest.raises(ValueError, match="already has an adapter"):
        put_on(put_on(base))
    with pytest.raises(ValueError, match="has an adapter"):
        quantization.for_inference(put_on(base), "int8")
    with pytest.raises(ValueError, match="rank must be"):
        adapters.LoRA(rank=0, alpha=1)
    with pytest.raises(ValueError, match="floating"):
        adapters.LoRA(rank=1, alpha=1, dtype=jnp.int32)


def test_the_report_says_what_it_costs():
    base = model("llama")
    adapted = tuned(base, dataclasses.replace(LORA, dora=True))
    report, factors = adapters.report(adapted), nn.partition(adapted, adapters.trainable)[0]
    assert report.bytes == sum(v.nbytes for v in factors.values())
    assert report.base_bytes == sum(a.nbytes for a in jax.tree.leaves(base))
    assert "DoRA r=3" in str(report) and "vLLM: does not support DoRA" in str(report)


def test_preferences_on_a_tuned_adapter_refer_to_the_tuned_model():
    """With `add(frozen(tuned), ...)` the base is the tuned policy, so the first loss is ln 2 and learns."""
    first = tuned(tiny.model())
    policy = jit(lambda first: adapters.add(adapters.freeze(first), LORA, rngs=nnx.Rngs(3)))(first)
    close(logits(adapters.base_model(policy)), logits(first))
    assert np.abs(np.subtract(*map(logits, (adapters.base_model(first), first)))).max() > 0.1

    tokens = np.random.default_rng(0).integers(0, 16, (2, 4, 12), dtype=np.int32)
    batch = {half: {"tokens": x, "targets": x} for half, x in zip(("chosen", "rejected"), tokens, strict=True)}

    def gradient(policy):
        params, rest = nn.partition(policy, adapters.trainable)
        loss = post_training.DPO(reference=adapters.base_model)
        f = lambda params: loss(nn.combine(params, rest), batch, dtype=jnp.float32)
        return jax.value_and_grad(f, has_aux=True)(params)

    (value, stats), grads = jit(gradient)(policy)
    np.testing.assert_allclose(value / stats.num_targets, np.log(2), rtol=1e-6)
    assert max(np.abs(g).max() for g in grads.values()) > 1e-4
