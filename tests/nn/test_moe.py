"""Mixture of experts: the layer, its losses and corrections; every dispatch against the loop over experts."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.nn.experts import _dispatch as dispatch
from maxlib.observability import forward_flops
from tests.nn.experts import (
    DIM,
    LOSSES,
    MLP,
    E,
    X,
    call,
    close,
    filled,
    in_float64,
    input_router,
    inputs,
    lengths,
    moe,
    router,
    value_and_gradients,
    with_dora,
    with_nvfp4,
)


def test_equals_the_definition_in_float64():
    layer, x, ctx = moe(bias=True), inputs(), lengths(7, 4, 0, 1)
    close(call(layer, x, ctx)[0], in_float64(layer, x, np.asarray(ctx.valid)))


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"x must be rows of tokens `B T D`, got x of shape \(4, 8\)"):
        inspect.unwrap(nn.MoE.__call__)(moe(), jnp.zeros((4, 8)))  # past the types, which only tests check


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


VARIANTS = {
    "biases, shared": {"bias": True, "activation": ops.ClampedSwiGLU(limit=1.0), "shared": True},
    "weights on the input, matrices the other way": {"make_router": input_router, "weight_order": "EIO"},
}
VARIANTS["no gate, a latent width"] = {"gated": False, "activation": squared_relu, "latent_dim": 6, "shared": True}
VARIANTS["all"] = VARIANTS["biases, shared"] | VARIANTS["weights on the input, matrices the other way"]


@pytest.mark.parametrize(
    "name", ["all", *(pytest.param(name, marks=pytest.mark.full) for name in VARIANTS if name != "all")]
)
def test_it_equals_the_loop(name):
    """Values and gradients."""
    options, x, ctx = VARIANTS[name], inputs(), lengths(7, 4, 0, 1)
    if options.get("shared"):
        options = options | {"shared": filled(lambda: nn.GatedMLP(DIM, 5, rngs=nnx.Rngs(0)), seed=1)}
    layer = moe(**options)
    want = value_and_gradients(lambda layer, x: layer.reference(x, ctx), layer, x)
    close(value_and_gradients(lambda layer, x: layer(x, ctx)[0], layer, x), want)


def test_bfloat16_routes_in_float32():
    layer, x = moe(), inputs().astype(jnp.bfloat16)
    y, _ = call(layer, x)
    assert y.dtype == jnp.bfloat16
    route = jax.jit(lambda router, x: router(x))
    low, exact = route(layer.router, x), route(layer.router, x.astype(jnp.float32))
    assert low.weights.dtype == low.logits.dtype == jnp.float32
    np.testing.assert_array_equal(low.experts, exact.experts)
    close(y.astype(jnp.float32), in_float64(layer, x.astype(jnp.float32)), tol=0.03)


def test_padding_neither_routes_nor_counts():
    layer, ctx = moe(losses=LOSSES), lengths(7, 4, 0, 1)
    x, other = inputs(), jnp.asarray(np.where(ctx.valid[..., None], inputs(), inputs(seed=9)))
    (y, aux), (y_other, aux_other) = jax.device_get((call(layer, x, ctx), call(layer, other, ctx)))
    np.testing.assert_array_equal(y, y_other)
    valid = np.asarray(ctx.valid)
    assert not y[~valid].any() and y[valid].all()
    close(aux, aux_other, tol=1e-7)
    alone, aux_alone = call(layer, x[:1])
    close(y[:1], alone)
    _, aux_first = call(layer, x, lengths(7, 0, 0, 0))
    close(aux_first, aux_alone)


def test_all_padding_is_finite():
    layer, ctx = moe(losses=LOSSES), lengths(0, 0, 0, 0)
    got = call(layer, inputs(), ctx), value_and_gradients(lambda m, x: m(x, ctx)[0], layer, inputs())
    (y, aux), grads = jax.device_get(got)
    assert not y.any() and all(np.isfinite(v).all() for v in aux.values())
    assert all(not g.any() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("change", [with_nvfp4, with_dora])
def test_rows_of_no_expert_change_nothing(change):
    """Neither a scale of all rows nor the gradient of gains; behind a ragged exchange both may be NaN."""
    counts, used = jnp.array([5, 0, 9, 3, 0, 2]), 19
    trainable, rest = nn.partition(change(moe(mlp_dim=32)).gate)

    @jax.jit
    def results(trainable, rows, d):
        def run(trainable, rows):
            linear = nn.combine(trainable, rest)
            return linear.matmul.grouped(rows, linear.stored(rows.dtype), counts)

        out, pull = jax.vjp(run, trainable, rows)
        d_trainable, d_rows = pull(d)
        return out[:used], d_trainable, d_rows[:used]

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(24, width)).astype(np.float32) * (np.arange(24) < used)[:, None] for width in (DIM, 32)]
    unknown = [np.where((np.arange(24) < used)[:, None], a, np.float32("nan")) for a in arrays]
    jax.tree.map(np.testing.assert_array_equal, results(trainable, *arrays), results(trainable, *unknown))


DISPATCHES = [
    dispatch.dropless,
    functools.partial(dispatch.dropless, tile=4),
    functools.partial(dispatch.padded, capacity=4),
]


@pytest.mark.parametrize("make", DISPATCHES)
def test_dispatch_and_its_gradient_are_gathers(make):
    """A scatter of wide rows is slow on every backend."""
    plan = jax.jit(make, static_argnums=2)(np.array([[0, 1], [1, 2], [2, 1], [1, 0]]), np.ones(4, bool), 3)
    there_and_back = lambda x: dispatch.combine(dispatch.spread(x, plan), plan)
    pulled = lambda d: jax.vjp(there_and_back, d)[1](d)[0]
    x = np.ones((4, 5), np.float32)
    np.testing.assert_array_equal(jax.jit(there_and_back)(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(pulled)(x), 2 * x)
    assert "scatter" not in str(jax.make_jaxpr(pulled)(x))


def test_experts_begin_at_whole_tiles():
    """Five choices of expert 0, one of expert 2 and two of padding, in tiles of 4; 8 is the number of no choice."""
    experts, valid = np.array([[0, 2], [0, 0], [1, 1], [0, 0]]), np.array([True, True, False, True])
    plan = jax.device_get(jax.jit(dispatch.dropless, static_argnums=(2, 3))(experts, valid, 3, 4))
    np.testing.assert_array_equal(plan.counts, [8, 0, 4])
    np.testing.assert_array_equal(plan.source, [0, 2, 3, 6, 7, 8, 8, 8, 1, 8, 8, 8, 4, 5, 8, 8])
    np.testing.assert_array_equal(plan.row_of_choice, [[0, 8], [1, 2], [16, 16], [3, 4]])
    weights = np.arange(1.0, 9, dtype=np.float32).reshape(4, 2)
    factors = np.ravel(jax.jit(dispatch.spread_choices)(weights, plan))
    np.testing.assert_array_equal(factors[:12], [1, 3, 4, 7, 8, 0, 0, 0, 2, 0, 0, 0])


# Losses and loads


def test_load_counts_choices():
    layer, x, ctx = moe(), inputs(), lengths(7, 4, 0, 1)
    _, aux = call(layer, x, ctx)
    chosen = np.asarray(jax.jit(lambda layer, x: layer.router(x))(layer, x).experts)[np.asarray(ctx.valid)]
    np.testing.assert_allclose(aux["moe/load"], np.bincount(chosen.ravel(), minlength=E) / chosen.size, rtol=1e-6)


def test_losses_equal_their_formulas():
    layer, x, ctx = moe(make_router=lambda: router(score=jax.nn.sigmoid), losses=LOSSES), inputs(), lengths(7, 4, 0, 1)
    _, aux = call(layer, x, ctx)
    routing, valid = jax.device_get(jax.jit(lambda layer, x: layer.router(x))(layer, x)), np.asarray(ctx.valid)
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


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_losses_of_documents_alone_padded_and_packed_are_the_same(loss):
    """A balance within documents is the mean over those of the batch, wherever they are."""
    layer, x, (few, many) = moe(), inputs(1, 7), (2, 5)
    both = jnp.concatenate([x, x])
    losses = jax.jit(
        lambda layer: {
            "alone": [loss(layer.router(part), None) for part in (x[:, :few], x[:, few:])],
            "padded": [
                loss(layer.router(x), nn.make_context(1, 7, valid=jnp.asarray([inside])))
                for inside in ([True] * few + [False] * many, [False] * few + [True] * many)
            ],
            "packed": loss(layer.router(x), nn.make_context(1, 7, segment_ids=jnp.asarray([[1] * few + [2] * many]))),
            "rows": loss(
                layer.router(both),
                nn.make_context(
                    2, 7, valid=jnp.asarray([[True] * few + [False] * many, [False] * few + [True] * many])
                ),
            ),
        }
    )(layer)
    np.testing.assert_allclose(losses["padded"], losses["alone"], rtol=1e-5)
    np.testing.assert_allclose(losses["packed"], losses["rows"], rtol=1e-5)
    if isinstance(loss, nn.router.SequenceBalance):
        np.testing.assert_allclose(losses["packed"], np.mean(losses["alone"]), rtol=1e-5)


# ExpertBias without a loss


class Block(nnx.Module):
    def __init__(self, kind, *, rngs):
        make = lambda: nn.Router(DIM, E, top_k=1, score=jax.nn.sigmoid, expert_bias=True, rngs=rngs)
        self.mlp = nn.GatedMLP(DIM, MLP, rngs=rngs) if kind == "d" else nn.MoE(DIM, MLP, router=make(), rngs=rngs)

    def __call__(self, x, ctx, cache):
        y, aux = self.mlp(x, ctx) if isinstance(self.mlp, nn.MoE) else (self.mlp(x), {})
        return x + y, cache, aux


@pytest.mark.parametrize(
    "kinds", ["dababa", *(pytest.param(kinds, marks=pytest.mark.full) for kinds in ("daaaaa", "dabcef"))]
)
def test_router_bias_update_finds_every_layer(kinds):
    stack = filled(lambda: nn.Stack(lambda kind, rngs: Block(kind, rngs=rngs), kinds, rngs=nnx.Rngs(0)))
    assert not any("expert_bias" in path for path in nn.partition(stack)[0])
    load = np.random.default_rng(0).dirichlet(np.ones(E), size=5).astype(np.float32)  # layer 0 has no experts
    new = jax.jit(functools.partial(nn.router.update_router_bias, rate=0.1))(stack, load)
    for i in range(1, 6):
        moved = new[i].mlp.router.expert_bias[...] - stack[i].mlp.router.expert_bias[...]
        np.testing.assert_allclose(moved, 0.1 * np.sign(1 / E - load[i - 1]), atol=1e-6)
    with pytest.raises(ValueError, match="5 router expert biases"):
        nn.router.update_router_bias(stack, jnp.asarray(load[1:]), rate=0.1)


def test_router_bias_update_balances():
    layer, x = moe(make_router=lambda: router(score=jax.nn.sigmoid, expert_bias=True)), inputs(T=64)
    worst = []
    step = jax.jit(lambda layer, load: nn.router.update_router_bias(layer, load, rate=0.02))
    for _ in range(40):
        load = call(layer, x)[1]["moe/load"]
        worst.append(float(np.max(load) * E))
        layer = step(layer, load)
    assert worst[0] > 1.5 and worst[-1] < 1.2


def test_correction_picks_but_does_not_weigh():
    plain, x = router(score=jax.nn.sigmoid, renormalize=False, expert_bias=True), inputs()
    pushed = jax.tree.map(lambda a: a, plain)
    pushed.expert_bias[...] = jnp.zeros(E).at[3].set(10.0)
    run = jax.jit(lambda router, x: router(x))
    routing, unpushed = jax.device_get((run(pushed, x), run(plain, x)))
    assert (routing.experts == 3).any(axis=-1).all()
    scores = 1 / (1 + np.exp(-unpushed.logits))
    np.testing.assert_allclose(routing.weights, np.take_along_axis(scores, routing.experts, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(routing.probs, unpushed.probs, rtol=1e-6)


def test_flops_are_those_of_the_chosen_experts():
    x, routed, gate = inputs(), 3 * 2 * X * DIM * MLP, 2 * DIM * E
    assert forward_flops(lambda m, x: m(x)[0], moe(), x) == x[..., 0].size * (routed + gate)


def test_a_router_with_an_input_and_factors_of_its_own_in_float64():
    rngs = nnx.Rngs(0)
    layer = nn.MoE(DIM, MLP, router=nn.router.ScaledRouter(DIM, E, top_k=X, rngs=rngs), rngs=rngs)
    factors = jnp.linspace(0.5, 2, E)
    layer.router.expert_scale.set_value(factors)
    x, z = inputs(), jnp.cos(inputs())
    y, _ = jax.jit(lambda layer, x, z: layer(x, routed_by=z))(layer, x, z)

    wide = lambda part: np.float64(part.w[...])
    unit = np.float64(z) / np.sqrt((np.float64(z) ** 2).mean(-1, keepdims=True) + 1e-6)
    probs = np.exp(unit @ wide(layer.router.gate).T / np.sqrt(DIM))
    chosen = np.argsort(-probs, axis=-1)[..., :X]
    weights = np.take_along_axis(probs, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) * np.float64(factors)[chosen]
    want, x64 = np.zeros(x.shape), np.float64(x)
    for b, t, k in np.ndindex(*chosen.shape):
        gate, up, down = (wide(part)[chosen[b, t, k]] for part in (layer.gate, layer.up, layer.down))
        g = gate @ x64[b, t]
        want[b, t] += weights[b, t, k] * down @ (g / (1 + np.exp(-g)) * (up @ x64[b, t]))
    np.testing.assert_allclose(y, want, atol=1e-5 * np.abs(want).max())


def test_balanced_routing_costs_the_weight():
    parts = np.arange(8).reshape(2, 2, 2), *(np.full((2, 2, n), x, np.float32) for n, x in ((2, 1), (8, 0), (8, 1 / 8)))
    flat = nn.router.Routing(*map(jnp.asarray, parts))
    losses = nn.router.SwitchBalance(0.5), nn.router.SequenceBalance(0.5)
    for cost in jax.jit(lambda flat: [loss(flat, None) for loss in losses])(flat):
        np.testing.assert_allclose(cost, 0.5, rtol=1e-6)


def test_balance_is_that_of_more_tokens_than_the_root_of_the_largest_integer():
    parts = [
        (np.arange(70_000) % 2)[None, :, None],
        *(np.full((1, 70_000, n), x) for n, x in ((1, 1), (2, 0), (2, 0.5))),
    ]
    routing = nn.router.Routing(jnp.asarray(parts[0]), *(jnp.asarray(x, jnp.float32) for x in parts[1:]))
    ctx = nn.make_context(1, 70_000, valid=jnp.ones((1, 70_000), bool))
    np.testing.assert_allclose(jax.jit(nn.router.SwitchBalance(0.5))(routing, ctx), 0.5, rtol=1e-6)
