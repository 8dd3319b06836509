import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, ops, training
from maxlib import quantization as quant
from maxlib.quantization.matmul import Quantized
from tests.quantization.tiny import loss, model
from tests.training import tiny

GRADIENTS = quant.Format("int8", "int8", "int8")
BATCH = jax.tree.map(jnp.asarray, tiny.batch())
FP8 = quant.TRAINING["fp8"]


@functools.cache
def losses(name: str, rules) -> list[float]:
    """Of a few steps, through a scanned and rematerialised stack."""
    start = model(name) if rules is None else quant.for_training(model(name), rules)
    optimizer = tiny.optimizer(start, 1e-2)
    state = training.make_state(jax.tree.map(jnp.copy, start), optimizer)
    step = tiny.jit_step(training.make_train_step(loss, optimizer))
    found = []
    for _ in range(6):
        state, metrics = step(state, tiny.batch())
        found.append(float(metrics["nll"]))
    return found


@pytest.mark.parametrize("name", ["llama", "moe"])
@pytest.mark.parametrize("rules", ["fp8", GRADIENTS], ids=str)
def test_loss_stays_near_that_of_full_precision(name, rules):
    full, low = losses(name, None), losses(name, rules)
    assert full[-1] < 0.97 * full[0]
    np.testing.assert_allclose(low, full, rtol=0.01)
    assert low != full


@pytest.mark.parametrize(("name", "rules", "operands"), [("llama", "int8", "int8"), ("moe", "fp8", "float8_e4m3fn")])
def test_every_matmul_with_a_weight_is_quantized(name, rules, operands):
    """What is left: attention's own products, a router's scores, the weighted sum of experts' results."""
    forward = lambda m: m(BATCH["tokens"], dtype=jnp.float32).hidden
    low = quant.for_training(model(name), rules)
    exact, found = (quant.matmuls(forward, m) for m in (model(name), low))
    quantized = sum(flops for what, flops in found.items() if f"{operands} x {operands}" in what)
    assert sum(found.values()) == sum(exact.values())
    assert quantized == 2 * BATCH["tokens"].size * weights(low) * (
        1 if name == "llama" else 2 / 4
    )  # two of four experts
    assert ("float32 x float32" in found) == (name == "moe")


def weights(m) -> int:
    return sum(row.numbers for row in quant.report(m).rows if row.format)


def test_gradients_are_quantized_where_the_format_says():
    backward = jax.grad(lambda m: loss(m, BATCH)[0])
    experts, dense = (quant.for_training(model(name), "fp8") for name in ("moe", "llama"))
    assert "grouped_matmul float8_e5m2 x float8_e4m3fn" in quant.matmuls(backward, experts)
    # An einsum may take its operands in either order.
    found = sum(flops for what, flops in quant.matmuls(backward, dense).items() if "float8_e5m2" in what)
    assert found == 2 * 2 * BATCH["tokens"].size * weights(dense)


@pytest.mark.parametrize(("format", "layout"), [(GRADIENTS, "EOI"), (FP8, "EIO")], ids=str)
def test_grouped_product_and_gradients_are_near_the_exact_ones(format, layout):
    key = jax.random.split(jax.random.key(0), 3)
    rows, w = jax.random.normal(key[0], (40, 32)), jax.random.normal(key[1], (3, 16, 32))
    w = w if layout == "EOI" else w.swapaxes(1, 2)
    counts, d = jnp.array([21, 0, 15]), jax.random.normal(key[2], (40, 16))
    quantized = lambda rows, w: Quantized(format).grouped(rows, w, counts, layout)
    y, pull = jax.vjp(quantized, rows, w)
    want, want_pull = jax.vjp(lambda rows, w: ops.grouped_matmul(rows, w, counts, layout=layout), rows, w)
    for got, exact in zip((y, *pull(d)), (want, *want_pull(d)), strict=True):
        assert jnp.linalg.norm(got - exact) < 0.06 * jnp.linalg.norm(exact)
    assert not jnp.any(y[36:])


def test_gradient_of_a_single_matmul_is_the_exact_one():
    x = jnp.array([[127.0, -5.0, 3.0], [2.0, 127.0, 0.0]])
    w = jnp.array([[1.0, 127.0, 4.0], [127.0, -3.0, 9.0]])
    spec, m = "...I,OI->...O", Quantized(quant.Format("int8", "int8"))
    y, pull = jax.vjp(lambda x, w: m.einsum(spec, x, w), x, w)
    np.testing.assert_allclose(y, x @ w.T, rtol=0.02)
    for got, want in zip(pull(jnp.ones((2, 2))), (jnp.ones((2, 2)) @ w, jnp.ones((2, 2)) @ x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_parameters_keep_their_paths_and_full_precision_comes_back():
    q = quant.for_training(model("llama"), "int8")
    assert nn.variables(q).keys() == nn.variables(model("llama")).keys()
    assert jax.tree.structure(quant.full_precision(q)) == jax.tree.structure(model("llama"))


def test_first_and_last_layers_stay_high_and_the_others_are_scanned():
    m = jax.eval_shape(lambda: tiny.llama(num_layers=8))
    q = jax.eval_shape(lambda m: quant.for_training(m, [quant.high(0, -1), quant.Rule(quant.TRAINING["int8"])]), m)
    is_low = [isinstance(layer.attn.q.matmul, Quantized) for layer in jax.eval_shape(list, q.layers)]
    assert is_low == [False] + 6 * [True] + [False]
    assert q.layers.layout == {"num_layers": 8, "prefix": 1, "period": 2} and q.layers.repeats == 3


def test_laying_out_a_stack_anew_keeps_its_layers():
    m = tiny.llama(num_layers=5)
    new = m.layers.relaid(prefix=1, period=2)
    for old, now in zip(m.layers, new, strict=True):
        assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(now), strict=True))
    assert jax.tree.structure(new.relaid(prefix=0, period=1)) == jax.tree.structure(m.layers)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("int3", "there is no preset 'int3'"),
        (
            [quant.Rule(FP8, "layers.mlp.*"), quant.Rule(FP8, "layers.mpl.*")],
            r"decide none: \[Rule.*layers.mpl.*layers.attn.q",
        ),
        ([quant.Rule(FP8), quant.high(0)], "earlier rules win"),
        (quant.Format("int4", group=32), "training rounds activations too"),
        ([quant.Rule(FP8, kinds=("embedding",))], "embed: embeddings and heads"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    with pytest.raises(ValueError, match=message):
        quant.for_training(jax.eval_shape(lambda: model("llama")), rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int9"}, "weights must be one of"),
        ({"weights": "int8", "activations": "int4"}, "activations must be None or one of"),
        ({"weights": "int8", "gradients": "int8"}, "give activations too"),
        ({"weights": "int4", "activations": "int8"}, "with quantized activations"),
        ({"weights": "int4", "group": 1}, "group must be at least 2"),
    ],
)
def test_formats_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        quant.Format(**options)


def test_dtypes_that_the_backend_lacks(monkeypatch):
    from maxlib.quantization import formats

    assert formats._problem("int4", "int4", "cpu") is not None  # this compiler says so itself
    monkeypatch.setattr(formats, "_problem", lambda a, b, backend: "no such dot")
    with pytest.raises(ValueError, match="must multiply float8_e4m3fn by float8_e4m3fn .*no such dot"):
        quant.for_training(model("llama"), "fp8")
