"""Mixture of experts: routers and blocks against transformers, every dispatch against the loop over experts."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding
from maxlib.nn import dispatch
from maxlib.training.flops import forward_flops
from tests.models.parity import QUICK

DIM, MLP, E, X = 16, 12, 6, 2
LOSSES = (nn.SwitchBalance(0.3), nn.SequenceBalance(0.2), nn.RouterZ(0.1))


def router(**options):
    return nn.Router(DIM, E, **{"top_k": X, "rngs": nnx.Rngs(1), **options})


def filled(make, seed=0):
    """The module with random values everywhere, biases too, and nothing to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda a: jnp.asarray(rng.normal(size=a.shape) * (0.5 if a.ndim == 2 else 0.3), a.dtype)
    return jax.tree.map(draw, jax.eval_shape(make))


def moe(*, make_router=router, **options):
    return filled(lambda: nn.MoE(DIM, MLP, router=make_router(), rngs=nnx.Rngs(0), **options))


def inputs(B=4, T=7, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, DIM)), jnp.float32)


def lengths(*each, T=7):
    return jax.jit(lambda valid: nn.context(*valid.shape, valid=valid))(np.arange(T)[None] < np.array(each)[:, None])


@jax.jit
def call(layer, x, ctx=None):
    return layer(x, ctx)


def one_expert(layer, e, x):
    """A single expert in float64, silu gated."""
    x = np.asarray(x, np.float64)
    linear = lambda m, x: x @ np.asarray(m.w[e], np.float64).T + (0 if m.b is None else np.asarray(m.b[e], np.float64))
    gate, up = linear(layer.gate, x), linear(layer.up, x)
    return linear(layer.down, gate / (1 + np.exp(-gate)) * up)


def in_float64(layer, x, valid=None, room=None):
    """The definition, token by token, with the layer's own routing; and how many choices found no room."""
    routing = jax.tree.map(np.asarray, jax.jit(layer.router)(x))
    outputs, y, dropped = [one_expert(layer, e, x) for e in range(E)], np.zeros(x.shape), 0
    for b in range(len(x)):
        taken = np.zeros(E, int)
        for t in range(x.shape[1]) if valid is None else np.flatnonzero(valid[b]):
            for e, weight in zip(routing.experts[b, t], routing.weights[b, t], strict=True):
                taken[e] += 1
                if room is not None and taken[e] > room:
                    dropped += 1
                else:
                    y[b, t] += weight * outputs[e][b, t]
    return y, dropped


def close(got, want, tol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tol * max(1, np.abs(np.asarray(b)).max())), got, want
    )


def value_and_gradients(run, layer, x):
    """Of a loss that weighs every output differently: the value, and gradients by path."""
    trainable, rest = nn.partition(layer)

    def loss(trainable, x):
        y = run(nn.combine(trainable, rest), x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=QUICK)(trainable, x)


# The layer


def test_equals_the_definition_in_float64():
    layer, x, ctx = moe(bias=True), inputs(), lengths(7, 4, 0, 1)
    close(call(layer, x, ctx)[0], in_float64(layer, x, np.asarray(ctx.valid))[0])


def input_router():
    return nn.InputRouter(DIM, E, top_k=X, rngs=nnx.Rngs(1))


VARIANTS = {
    "biases, shared": {"bias": True, "combine": nn.ClampedSwiGLU(limit=1.0), "shared": True},
    "weights on the input, matrices the other way": {"make_router": input_router, "layout": "EIO"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_dispatch_equals_the_loop(name):
    """Values and gradients."""
    options, x, ctx = VARIANTS[name], inputs(), lengths(7, 4, 0, 1)
    if options.get("shared"):
        options = options | {"shared": filled(lambda: nn.GatedMLP(DIM, 5, rngs=nnx.Rngs(0)), seed=1)}
    layer = moe(**options)
    want = value_and_gradients(lambda layer, x: layer.reference(x, ctx), layer, x)
    for capacity_factor in (None, 3.0):
        layer.capacity_factor = capacity_factor
        close(value_and_gradients(lambda layer, x: layer(x, ctx)[0], layer, x), want)


def test_layout_changes_no_values():
    one, other = (nn.MoE(DIM, MLP, router=router(), layout=layout, rngs=nnx.Rngs(0)) for layout in ("EOI", "EIO"))
    for part in ("gate", "up", "down"):
        np.testing.assert_array_equal(getattr(one, part).w[...], getattr(other, part).w[...].swapaxes(1, 2))
    close(call(one, inputs()), call(other, inputs()))


def test_bfloat16_routes_in_float32():
    layer, x = moe(), inputs().astype(jnp.bfloat16)
    y, _ = call(layer, x)
    assert y.dtype == jnp.bfloat16
    assert layer.router(x).weights.dtype == layer.router(x).logits.dtype == jnp.float32
    np.testing.assert_array_equal(layer.router(x).experts, layer.router(x.astype(jnp.float32)).experts)
    close(y.astype(jnp.float32), in_float64(layer, x.astype(jnp.float32))[0], tol=0.03)


def test_padding_neither_routes_nor_counts():
    layer, ctx = moe(losses=LOSSES), lengths(7, 4, 0, 1)
    x, other = inputs(), jnp.where(ctx.valid[..., None], inputs(), inputs(seed=9))
    (y, aux), (y_other, aux_other) = call(layer, x, ctx), call(layer, other, ctx)
    np.testing.assert_array_equal(y, y_other)
    assert not y[~ctx.valid].any() and y[ctx.valid].all()
    close(aux, aux_other, tol=1e-7)
    alone, aux_alone = call(layer, x[:1])
    close(y[:1], alone)
    _, aux_first = call(layer, x, lengths(7, 0, 0, 0))
    close(aux_first, aux_alone)


def test_all_padding_is_finite():
    layer, ctx = moe(losses=LOSSES, capacity_factor=1.0), lengths(0, 0, 0, 0)
    (y, aux), grads = call(layer, inputs(), ctx), value_and_gradients(lambda m, x: m(x, ctx)[0], layer, inputs())
    assert not y.any() and all(np.isfinite(v).all() for v in aux.values())
    assert all(not g.any() for g in jax.tree.leaves(grads))


def test_capacity_drops_who_comes_later_in_the_row():
    layer, x, ctx = moe(capacity_factor=0.7), inputs(T=40), lengths(40, 23, 0, 9, T=40)
    capacity = layer.capacity(40)
    assert capacity == -(-0.7 * 40 * X // E)
    valid = np.asarray(ctx.valid)
    want, dropped = in_float64(layer, x, valid, capacity)
    y, aux = call(layer, x, ctx)
    close(y, want)
    assert dropped > 0
    np.testing.assert_allclose(aux["moe/dropped"], dropped / (valid.sum() * X), rtol=1e-6)


def test_capacity_is_causal_and_keeps_rows_apart():
    layer, x = moe(capacity_factor=0.7, bias=True), inputs(T=40)
    changed = x.at[:, 20:].add(1.0).at[1].add(1.0)
    y, y_changed = call(layer, x)[0], call(layer, changed)[0]
    np.testing.assert_array_equal(y[0, :20], y_changed[0, :20])
    assert (y[0, 20:] != y_changed[0, 20:]).any()


@pytest.mark.parametrize("make", [dispatch.dropless, functools.partial(dispatch.padded, capacity=2)])
def test_dispatch_and_its_gradient_are_gathers(make):
    """A scatter of wide rows is slow on every backend."""
    plan = jax.jit(make, static_argnums=2)(np.array([[0, 1], [1, 2], [2, 1], [1, 0]]), np.ones(4, bool), 3)
    there_and_back = lambda x: dispatch.collect(dispatch.spread(x, plan), plan).sum(axis=1)
    pulled = lambda d: jax.vjp(there_and_back, d)[1](d)[0]
    x, kept = np.ones((4, 5), np.float32), plan.kept.sum(axis=1)[:, None]
    np.testing.assert_array_equal(jax.jit(there_and_back)(x), x * kept)
    np.testing.assert_array_equal(jax.jit(pulled)(x), x * kept)
    assert "scatter" not in str(jax.make_jaxpr(pulled)(x))


# Losses and loads


def test_load_counts_choices():
    layer, x, ctx = moe(), inputs(), lengths(7, 4, 0, 1)
    _, aux = call(layer, x, ctx)
    chosen = np.asarray(layer.router(x).experts)[np.asarray(ctx.valid)]
    np.testing.assert_allclose(aux["moe/load"], np.bincount(chosen.ravel(), minlength=E) / chosen.size, rtol=1e-6)
    assert "moe/dropped" not in aux


def test_losses_equal_their_formulas():
    layer, x, ctx = moe(make_router=lambda: router(score=jax.nn.sigmoid), losses=LOSSES), inputs(), lengths(7, 4, 0, 1)
    _, aux = call(layer, x, ctx)
    routing, valid = jax.tree.map(np.asarray, layer.router(x)), np.asarray(ctx.valid)
    scores = 1 / (1 + np.exp(-routing.logits.astype(np.float64)))
    probs = scores / scores.sum(axis=-1, keepdims=True)

    def balance(tokens):
        share = np.bincount(routing.experts[tokens].ravel(), minlength=E) / (X * tokens.sum())
        return E * np.sum(share * probs[tokens].mean(axis=0))

    rows = [valid & (np.arange(4) == b)[:, None] for b in (0, 1, 3)]
    np.testing.assert_allclose(aux["loss/moe_balance"], 0.3 * balance(valid), rtol=1e-5)
    np.testing.assert_allclose(aux["loss/moe_sequence_balance"], 0.2 * np.mean([balance(r) for r in rows]), rtol=1e-5)
    lse = np.log(np.exp(routing.logits[valid].astype(np.float64)).sum(axis=-1))
    np.testing.assert_allclose(aux["loss/router_z"], 0.1 * np.mean(lse**2), rtol=1e-5)


def test_balanced_routing_costs_the_weight():
    flat = nn.Routing(
        jnp.arange(8).reshape(2, 2, 2), jnp.ones((2, 2, 2)), jnp.zeros((2, 2, 8)), jnp.full((2, 2, 8), 1 / 8)
    )
    for loss in (nn.SwitchBalance(0.5), nn.SequenceBalance(0.5)):
        np.testing.assert_allclose(loss(flat, None), 0.5, rtol=1e-6)


# Correction without a loss


class Block(nnx.Module):
    def __init__(self, i, *, rngs):
        make = lambda: nn.Router(DIM, E, top_k=1, score=jax.nn.sigmoid, correction=True, rngs=rngs)
        self.mlp = nn.GatedMLP(DIM, MLP, rngs=rngs) if i == 0 else nn.MoE(DIM, MLP, router=make(), rngs=rngs)

    def __call__(self, x, ctx, cache):
        y, aux = self.mlp(x, ctx) if isinstance(self.mlp, nn.MoE) else (self.mlp(x), {})
        return x + y, cache, aux


@pytest.mark.parametrize(("prefix", "period"), [(1, 1), (1, 2), (6, 1)])
def test_router_bias_update_finds_every_layer(prefix, period):
    make = lambda i, rngs: Block(i, rngs=rngs)
    stack = filled(lambda: nn.Stack(make, 6, prefix=prefix, period=period, rngs=nnx.Rngs(0)))
    assert not any("correction" in path for path in nn.partition(stack)[0])
    load = np.random.default_rng(0).dirichlet(np.ones(E), size=5).astype(np.float32)  # layer 0 has no experts
    new = jax.jit(functools.partial(nn.update_router_bias, rate=0.1))(stack, load)
    for i in range(1, 6):
        moved = new[i].mlp.router.correction[...] - stack[i].mlp.router.correction[...]
        np.testing.assert_allclose(moved, 0.1 * np.sign(1 / E - load[i - 1]), atol=1e-6)
    with pytest.raises(ValueError, match="5 router corrections"):
        nn.update_router_bias(stack, jnp.asarray(load[1:]), rate=0.1)


def test_router_bias_update_balances():
    layer, x = moe(make_router=lambda: router(score=jax.nn.sigmoid, correction=True)), inputs(T=64)
    worst = []
    for _ in range(40):
        _, aux = call(layer, x)
        worst.append(float(aux["moe/load"].max() * E))
        layer = nn.update_router_bias(layer, aux["moe/load"], rate=0.02)
    assert worst[0] > 1.5 and worst[-1] < 1.2


def test_correction_picks_but_does_not_weigh():
    plain, x = router(score=jax.nn.sigmoid, renormalize=False, correction=True), inputs()
    pushed = jax.tree.map(lambda a: a, plain)
    pushed.correction[...] = jnp.zeros(E).at[3].set(10.0)
    routing = pushed(x)
    assert (routing.experts == 3).any(axis=-1).all()
    scores = jax.nn.sigmoid(plain(x).logits)
    np.testing.assert_allclose(routing.weights, jnp.take_along_axis(scores, routing.experts, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(routing.probs, plain(x).probs, rtol=1e-6)


def test_flops_are_those_of_the_chosen_experts():
    x, routed, gate = inputs(), 3 * 2 * X * DIM * MLP, 2 * DIM * E
    combine = 2 * X * DIM
    assert forward_flops(lambda m, x: m(x)[0], moe(), x) == x[..., 0].size * (routed + gate + combine)


# Meshes

MESHES = {
    "dropless": (dict(data=2, fsdp=2, tensor=2), None, "EIO"),
    "with a capacity": (dict(fsdp=4, tensor=2), 0.8, "EOI"),
}


def loss_and_gradients(layer, x, valid):
    trainable, rest = nn.partition(layer)

    def loss(trainable, x):
        y, aux = nn.combine(trainable, rest)(x, nn.context(*valid.shape, valid=valid))
        return jnp.sum(jnp.sin(y)) + sum(v for k, v in aux.items() if k.startswith("loss/")), (y, aux)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(trainable, x))


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(name):
    degrees, capacity_factor, layout = MESHES[name]
    mesh, rules, x = sharding.make_mesh(**degrees), sharding.FSDP_TP, inputs(B=8)
    layer = moe(bias=True, losses=LOSSES, capacity_factor=capacity_factor, layout=layout)
    valid = jnp.arange(7)[None] < jnp.arange(8)[:, None]
    want = loss_and_gradients(layer, x, valid)
    with sharding.use(mesh, rules):
        got = loss_and_gradients(jax.device_put(layer, sharding.shardings(layer, mesh, rules)), x, valid)
    close(got, want)


SPLIT_EXPERTS = {
    "one on each device": (dict(expert=8), sharding.EP, (1, MLP, DIM)),
    "in parts": (dict(expert=2, fsdp=2, tensor=2), sharding.PRESETS["ep_tp"], (4, MLP // 2, DIM // 2)),
}


@pytest.mark.parametrize("name", SPLIT_EXPERTS)
def test_experts_split_over_devices_equal_the_loop(name):
    """Values and gradients, dropless and with room for all."""
    degrees, rules, part = SPLIT_EXPERTS[name]
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), bias=True)
    mesh, x, valid = sharding.make_mesh(**degrees), inputs(B=8), np.arange(7)[None] < np.arange(8)[:, None]
    context = lambda: nn.context(*valid.shape, valid=jnp.asarray(valid))
    want = jax.device_get(value_and_gradients(lambda layer, x: layer.reference(x, context()), layer, x))
    split = jax.device_put(layer, sharding.shardings(layer, mesh, rules))
    assert split.gate.w[...].addressable_shards[0].data.shape == part
    for capacity_factor in (None, 8 / X):
        split.capacity_factor = capacity_factor
        with sharding.use(mesh, rules):
            got = value_and_gradients(lambda layer, x: layer(x, context())[0], split, x)
        close(jax.device_get(got), want)


def test_dropless_whether_experts_share_evenly_or_two_get_everything():
    """The usual exchange and the one for the worst case, in one program; which one runs is for the data to say."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)))
    mesh, x = sharding.make_mesh(expert=4, data=2), inputs(B=8, T=16)
    split = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.EP))
    gradients = jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)[0])), argnums=(0, 1)))
    looped = jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m.reference(x))), argnums=(0, 1)))
    for even in (True, False):
        for one in (layer, split):
            one.router.gate.w[...] = one.router.gate.w[...] * even  # equal scores: the first experts win everywhere
        assert (np.bincount(np.ravel(layer.router(x).experts)).max() == 8 * 16) != even
        with sharding.use(mesh, sharding.EP):
            got = gradients(split, x)
        close(jax.device_get(got), jax.device_get(looped(layer, x)))


@pytest.mark.parametrize(("B", "degrees"), [(1, dict(data=4, tensor=2)), (4, dict(data=1, tensor=8))])
def test_what_does_not_divide_stays_whole(B, degrees):
    layer, x = moe(bias=True), inputs(B=B)
    assert MLP % 8
    with sharding.use(sharding.make_mesh(**degrees), sharding.TP):
        got = call(layer, x)
    close(jax.device_get(got[0]), in_float64(layer, x)[0])


def test_no_activations_cross_the_data_axis():
    """Each device sorts its own tokens: only weights are gathered over the mesh."""
    mesh, x, layer = sharding.make_mesh(fsdp=8), inputs(B=8, T=256), moe()
    with sharding.use(mesh, sharding.FSDP):
        layer = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.FSDP))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))
        step = jax.jit(jax.grad(lambda m, x: m(x)[0].sum(), argnums=(0, 1)))
        text = step.lower(layer, x).compile().as_text()
    moved = re.findall(
        r"= \(?\w+\[([\d,]*)\].* (?:all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text
    )
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in moved]
    assert len(sizes) >= 3 and max(sizes) <= E * MLP * DIM < x.size / 8


@pytest.mark.parametrize("capacity_factor", [None, 2.0])
def test_tokens_travel_to_their_experts(capacity_factor):
    """No expert's weights move, nor more tokens than one device has: dropless they go in as many turns as there are
    devices.
    """
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), capacity_factor=capacity_factor)
    mesh, x = sharding.make_mesh(expert=8), inputs(B=8, T=16)
    layer = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.EP | {"embed": None}))
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("expert")))
    with sharding.use(mesh, sharding.EP | {"embed": None}):
        run = jax.jit(lambda m, x: sharding.constrain(m(x)[0], "batch", "seq", None))
        text = run.lower(layer, x).compile().as_text()
    found = re.findall(r"= (.*?) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    assert {kind for shape, kind in found if "f32" in shape and f",{DIM}]" in shape} == {"all-to-all"}
    assert not any(f"{MLP},{DIM}]" in shape or f"{DIM},{MLP}]" in shape for shape, _ in found)


# transformers


def modeling(family):
    pytest.importorskip("torch")
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}")


def tiny_config(family, name, **options):
    """Every spelling of the sizes that some family uses."""
    config = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=DIM,
        intermediate_size=MLP,
        moe_intermediate_size=MLP,
        num_experts_per_tok=X,
        n_routed_experts=E,
        num_attention_heads=2,
    )
    return getattr(config, name)(**sizes | dict(num_local_experts=E, num_experts=E, mlp_bias=False) | options)


def randomized(module, seed=0):
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.normal_(std=0.5)
    return module.eval()


def numpy_of(module):
    return {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in module.state_dict().items()}


ROUTERS = {
    "Mixtral": ("mixtral", "MixtralConfig", "MixtralTopKRouter", {}, {}),
    "Qwen3": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {}),
    "Qwen3 as it is": (
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeTopKRouter",
        {"norm_topk_prob": False},
        {"renormalize": False},
    ),
    "DeepSeek V2-Lite": (
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2TopkRouter",
        {"topk_method": "greedy", "routed_scaling_factor": 1.5},
        {"renormalize": False, "scale": 1.5},
    ),
    "DeepSeek V2": (
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 16.0},
        {"renormalize": False, "scale": 16.0, "groups": nn.GroupLimit(3, 2, best=1)},
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3TopkRouter",
        {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {"score": jax.nn.sigmoid, "scale": 2.5, "groups": nn.GroupLimit(3, 2), "correction": True},
    ),
    "GPT-OSS": ("gpt_oss", "GptOssConfig", "GptOssTopKRouter", {}, {"bias": True}),
    "Llama 4": ("llama4", "Llama4TextConfig", "Llama4Router", {}, None),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_router_equals_transformers(name):
    family, config, router_name, hf_options, options = ROUTERS[name]
    theirs = randomized(getattr(modeling(family), router_name)(tiny_config(family, config, **hf_options)))
    mine = input_router() if options is None else router(**options)
    values = numpy_of(theirs)
    mine.gate.w[...] = values["weight"]
    if mine.gate.b is not None:
        mine.gate.b[...] = values["bias"]
    if "e_score_correction_bias" in values:
        mine.correction[...] = values["e_score_correction_bias"]
    x = inputs(B=8, T=50)
    np.testing.assert_allclose(shares(jax.jit(lambda m, x: m(x))(mine, x)), hf_shares(theirs, x), rtol=1e-4, atol=1e-6)


def shares(routing):
    """The weight of every expert for every token."""
    weights = routing.weights if routing.input_weights is None else routing.input_weights
    return jnp.einsum("...X,...XE->...E", weights, jax.nn.one_hot(routing.experts, E)).reshape(-1, E)


def hf_shares(module, x):
    import torch

    out = module(torch.tensor(np.asarray(x)).reshape(-1, DIM))
    if len(out) == 2:  # Llama 4 returns the scores of all experts
        return out[0].detach().numpy()
    _, weights, experts = (part.detach() for part in out)
    return torch.zeros(len(weights), E).scatter_(1, experts, weights).numpy()


BLOCKS = {
    "DeepSeek V3": (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3MoE",
        "gate",
        {"n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        ROUTERS["DeepSeek V3"][4],
    ),
    "GPT-OSS": ("gpt_oss", "GptOssConfig", "GptOssMLP", "router", {}, {"bias": True}),
    "Llama 4": ("llama4", "Llama4TextConfig", "Llama4TextMoe", "router", {}, None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_equals_transformers(name):
    torch = pytest.importorskip("torch")
    family, config, block, gate, hf_options, options = BLOCKS[name]
    theirs = randomized(getattr(modeling(family), block)(tiny_config(family, config, **hf_options)))
    values = numpy_of(theirs)
    mine = loaded(values, gate, lambda: input_router() if options is None else router(**options), name == "GPT-OSS")
    x = inputs()
    want = theirs(torch.tensor(np.asarray(x)))
    want = (want[0] if isinstance(want, tuple) else want).detach().numpy().reshape(x.shape)
    close(call(mine, x)[0], want)


def loaded(values, gate, make_router, is_gpt_oss):
    width = next((w.shape[0] for name, w in values.items() if "shared" in name and "up_proj" in name), None)
    shared = lambda: None if width is None else nn.GatedMLP(DIM, width, rngs=nnx.Rngs(0))
    combine = nn.ClampedSwiGLU() if is_gpt_oss else nn.swiglu
    layer = filled(
        lambda: nn.MoE(
            DIM, MLP, router=make_router(), shared=shared(), combine=combine, bias=is_gpt_oss, rngs=nnx.Rngs(0)
        )
    )
    layer.router.gate.w[...] = values[f"{gate}.weight"]
    if layer.router.gate.b is not None:
        layer.router.gate.b[...] = values[f"{gate}.bias"]
    if getattr(layer.router, "correction", None) is not None:
        layer.router.correction[...] = values[f"{gate}.e_score_correction_bias"]
    gate_up, down = values["experts.gate_up_proj"], values["experts.down_proj"]
    if gate_up.shape[1] == DIM:  # GPT-OSS and Llama 4 keep them the other way round
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    halves = (gate_up[:, ::2], gate_up[:, 1::2]) if is_gpt_oss else (gate_up[:, :MLP], gate_up[:, MLP:])
    layer.gate.w[...], layer.up.w[...], layer.down.w[...] = *halves, down
    if is_gpt_oss:
        bias = values["experts.gate_up_proj_bias"]
        layer.gate.b[...], layer.up.b[...], layer.down.b[...] = (
            bias[:, ::2],
            bias[:, 1::2],
            values["experts.down_proj_bias"],
        )
    for part in ("gate", "up", "down") if width else ():
        names = [name for name in values if "shared" in name and f"{part}_proj" in name]
        getattr(layer.shared, part).w[...] = values[names[0]]
    return layer
