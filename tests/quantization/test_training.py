import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxlib import nn, observability, ops, sharding, training
from maxlib import quantization as quant
from maxlib.quantization._matmul import Quantized
from tests.quantization.tiny import loss, model, shapes, value_and_gradients
from tests.training import tiny

GRADIENTS = quant.TRAINING["int8_gradients"]
BATCH = jax.tree.map(jnp.asarray, tiny.batch())
FP8 = quant.TRAINING["fp8"]


@functools.cache
def losses(rules) -> list[float]:
    """Of a few steps, through a scanned and rematerialised stack of attention and experts."""
    start = model("both") if rules is None else quant.for_training(model("both"), rules)
    optimizer = tiny.optimizer(start, 3e-3)
    state = training.make_state(jax.tree.map(jnp.copy, start), optimizer)
    step = tiny.jit_step(training.make_train_step(loss, optimizer))
    values = []
    for _ in range(6):
        state, metrics = step(state, tiny.batch(rows=16))
        values.append(float(metrics["nll"]))
    return values


@pytest.mark.full
@pytest.mark.parametrize("rules", ["fp8", "int8_gradients", "fp8_block"])
def test_loss_stays_near_that_of_full_precision(rules):
    full, low = losses(None), losses(rules)
    assert full[-1] < 0.97 * full[0]
    np.testing.assert_allclose(low, full, rtol=0.01)
    assert low != full


@pytest.mark.parametrize(("name", "rules", "operands"), [("llama", "int8", "int8"), ("moe", "fp8", "float8_e4m3fn")])
def test_every_matmul_with_a_weight_is_quantized(name, rules, operands):
    """What is left: attention's own products, a router's scores, the weighted sum of experts' results."""
    forward = lambda m: m(BATCH["tokens"], dtype=jnp.float32).hidden
    low = quant.for_training(model(name), rules)
    exact, rounded = (observability.flops_by_dtype(forward, m) for m in (model(name), low))
    quantized = sum(flops for what, flops in rounded.items() if f"{operands} x {operands}" in what)
    assert sum(rounded.values()) == sum(exact.values())
    assert quantized == 2 * BATCH["tokens"].size * weights(low) * (
        1 if name == "llama" else 2 / 4
    )  # two of four experts
    assert ("float32 x float32" in rounded) == (name == "moe")


def weights(m) -> int:
    return sum(row.numbers for row in quant.report(m).rows if row.format)


def test_gradients_are_quantized_where_the_format_says():
    backward = jax.grad(lambda m: loss(m, BATCH)[0])
    experts, dense = (quant.for_training(model(name), "fp8") for name in ("moe", "llama"))
    experts_flops = observability.flops_by_dtype(backward, experts)
    assert {what for what in experts_flops if "grouped" in what} == {
        "grouped_matmul float8_e4m3fn x float8_e4m3fn",
        "grouped_matmul float8_e5m2 x float8_e4m3fn",
        "grouped_outer float8_e5m2 x float8_e4m3fn",
    }
    # An einsum may take its operands in either order.
    flops_of_gradients = sum(
        flops for what, flops in observability.flops_by_dtype(backward, dense).items() if "float8_e5m2" in what
    )
    assert flops_of_gradients == 2 * 2 * BATCH["tokens"].size * weights(dense)


@pytest.mark.parametrize(("format", "layout"), [(GRADIENTS, "EOI"), (FP8, "EIO")], ids=str)
def test_grouped_product_and_gradients_are_near_the_exact_ones(format, layout):
    key = jax.random.split(jax.random.key(0), 3)
    rows, w = jax.random.normal(key[0], (40, 32)), jax.random.normal(key[1], (3, 16, 32))
    w = w if layout == "EOI" else w.swapaxes(1, 2)
    counts, d = jnp.array([21, 0, 15]), jax.random.normal(key[2], (40, 16))
    exact = lambda rows, w: ops.grouped_matmul(rows, w, counts, weight_order=layout)
    quantized = lambda rows, w: Quantized(format).grouped(rows, w, counts, layout)
    unused = jnp.where(jnp.arange(40)[:, None] < 36, rows, jnp.nan)  # rows of no expert may hold anything
    results = value_and_gradients(quantized, d, unused, w)
    for got, want in zip(results, value_and_gradients(exact, d, rows, w), strict=True):
        assert 0 < jnp.linalg.norm(got - want) < 0.06 * jnp.linalg.norm(want)
    assert not jnp.any(results[0][36:]) and not jnp.any(results[1][36:])


@pytest.mark.parametrize("format", [GRADIENTS, FP8], ids=str)
def test_dense_product_and_gradients_are_near_the_exact_ones(format):
    """In a scanned and rematerialised stack of two layers, as models have them."""
    key = jax.random.split(jax.random.key(0), 3)
    x, ws = jax.random.normal(key[0], (24, 32)), jax.random.normal(key[1], (2, 32, 32)) / 32**0.5
    d = jax.random.normal(key[2], (24, 32))

    def run(einsum):
        layer = jax.checkpoint(lambda x, w: (einsum("...I,OI->...O", x, w), None))
        return value_and_gradients(lambda x, ws: jax.lax.scan(layer, x, ws)[0], d, x, ws)

    for got, want in zip(run(Quantized(format).einsum), run(jnp.einsum), strict=True):
        assert 0 < jnp.linalg.norm(got - want) < 0.09 * jnp.linalg.norm(want)


def test_gradients_of_experts_that_every_device_holds_are_summed():
    """Inside shard_map, each device with rows of its own."""
    key, mesh, split = (
        jax.random.split(jax.random.key(0), 2),
        sharding.make_mesh(data=2, devices=jax.devices()[:2]),
        P("data"),
    )
    rows, w = jax.random.normal(key[0], (48, 32)), jax.random.normal(key[1], (3, 16, 32))
    counts = jnp.array([[9, 0, 15], [3, 13, 8]])

    def loss(multiply, rows, w):
        local = lambda rows, w, counts: multiply(rows, w, counts[0])
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split), out_specs=split)
        return jnp.sum(mapped(rows, w, counts) ** 2)

    gradients = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    for got, want in zip(
        gradients(Quantized(GRADIENTS).grouped, rows, w), gradients(ops.grouped_matmul, rows, w), strict=True
    ):
        assert 0 < jnp.linalg.norm(got - want) < 0.06 * jnp.linalg.norm(want)


def test_gradient_of_a_single_matmul_is_the_exact_one():
    x = jnp.array([[127.0, -5.0, 3.0], [2.0, 127.0, 0.0]])
    w = jnp.array([[1.0, 127.0, 4.0], [127.0, -3.0, 9.0]])
    spec, m = "...I,OI->...O", Quantized(quant.Format("int8", "int8"))
    y, *gradients = value_and_gradients(functools.partial(m.einsum, spec), jnp.ones((2, 2)), x, w)
    np.testing.assert_allclose(y, x @ w.T, rtol=0.02)
    for got, want in zip(gradients, (np.ones((2, 2)) @ w, np.ones((2, 2)) @ x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_parameters_keep_their_paths_and_full_precision_comes_back():
    q = quant.for_training(model("llama"), "int8")
    assert nn.variables(q).keys() == nn.variables(model("llama")).keys()
    assert jax.tree.structure(quant.full_precision(q)) == jax.tree.structure(model("llama"))


def test_first_and_last_layers_stay_high_and_the_others_are_scanned():
    m = jax.eval_shape(lambda: tiny.llama(num_layers=8))
    q = jax.eval_shape(
        lambda m: quant.for_training(m, [quant.Rule(None, layers=(0, -1)), quant.Rule(quant.TRAINING["int8"])]), m
    )
    is_low = [isinstance(layer.attn.q.matmul, Quantized) for layer in jax.eval_shape(list, q.layers)]
    assert is_low == [False] + 6 * [True] + [False]
    assert q.layers.grouping == ((1, 1), (1, 6), (1, 1))
    q = jax.eval_shape(
        lambda m: quant.for_training(m, [quant.Rule(None, layers=(0, 1, 2)), quant.Rule(quant.TRAINING["int8"])]), m
    )
    assert q.layers.grouping == ((1, 3), (1, 5)) and q.layers.staged == 1
    is_low = [isinstance(layer.attn.q.matmul, Quantized) for layer in jax.eval_shape(list, q.layers)]
    assert is_low == 3 * [False] + 5 * [True]


def test_laying_out_a_stack_anew_keeps_its_layers():
    stack = jax.jit(lambda: nn.Stack(lambda _, rngs: tiny.Layer(rngs=rngs), 5, rngs=nnx.Rngs(0)))()
    new = jax.jit(lambda stack: stack.restacked("abcbc"))(stack)
    assert new.grouping == ((1, 1), (2, 2))
    for old, now in zip(*jax.device_get(jax.jit(lambda *stacks: [list(s) for s in stacks])(stack, new)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(now), strict=True))
    back = jax.eval_shape(lambda stack: stack.restacked(), new)
    assert jax.tree.structure(back) == jax.tree.structure(stack)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("int3", "there is no preset 'int3'"),
        (
            [quant.Rule(FP8, "layers.mlp.*"), quant.Rule(FP8, "layers.mpl.*")],
            r"match no matmul, .*: Rule\(match='layers.mpl.*layers.attn.q",
        ),
        ([quant.Rule(FP8), quant.Rule(None, layers=(0,))], "or only matmuls of earlier rules"),
        ([quant.Rule(None, layers=(0, 1, 7))], r"names the layers \[7\], but the largest stack has 2"),
        (quant.Format("int4", group=32), "must be a multiple of the group"),
        ([quant.Rule(FP8, kinds=("embedding",))], "embed: embeddings and heads"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    with pytest.raises(ValueError, match=message):
        quant.for_training(shapes("llama"), rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int9"}, "weights must be one of"),
        ({"weights": "int8", "activations": "int4"}, "activations must be None or one of"),
        ({"weights": "int8", "gradients": "int8"}, "and rounded activations"),
        ({"weights": "int4", "activations": "int8", "block": 32}, "gradients and blocks need weights"),
        ({"weights": "int4", "group": 1}, "group must be at least 2"),
        ({"weights": "nf4", "symmetric": False}, "zero points need weights in int8 or int4"),
    ],
)
def test_formats_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        quant.Format(**options)


class Odd(nnx.Module):
    """Half of it multiplies in a way that quantization knows."""

    def __init__(self):
        self.one = nn.Einsum("...D,FD->...F", (4, 4), ("mlp", "embed"), rngs=nnx.Rngs(0))
        self.other = nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_matrices_of_unknown_layers_are_never_left_silently():
    low = lambda rules: quant.report(jax.eval_shape(lambda: quant.for_training(Odd(), rules)))
    with pytest.warns(UserWarning, match=r"layer types are unknown: \['other.kernel'\]"):
        report = low("int8")
    assert report.unquantized == ("other.kernel",) and "in full precision: other.kernel" in report.summary
    assert low([quant.Rule(None, match="other.*", kinds=("unknown",)), quant.Rule(FP8)]).unquantized == (
        "other.kernel",
    )
    with pytest.raises(ValueError, match="other.kernel.* do not belong to layers that can be quantized"):
        low([quant.Rule(FP8, kinds=("dense", "unknown"))])


def test_filters_of_a_short_convolution_are_no_matrices():
    """They multiply nothing, and a warning of each hybrid would tell nobody anything."""
    layer = lambda: nn.GatedDeltaNet(16, num_heads=2, key_dim=8, value_dim=8, rngs=nnx.Rngs(0))
    assert quant.report(jax.eval_shape(lambda: quant.for_training(layer(), "int8"))).unquantized == ()
