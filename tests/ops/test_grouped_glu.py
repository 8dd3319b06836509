"""Gate and up projections of experts together: every implementation against the formula in float64, the kernel for
Hopper in the emulator and lowered for CUDA, and the mixture of experts that calls it.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from maxlib import nn, ops
from maxlib.kernels.grouped_matmul.mosaic_gpu import by_experts, by_rows, glu
from maxlib.observability import forward_flops
from maxlib.ops._grouped_matmul import api
from maxlib.ops._grouped_matmul import glu as glu_module
from tests.ops.attention import emulator
from tests.ops.hopper import gpu, no_gpu
from tests.ops.test_grouped_matmul import close, loop
from tests.ops.test_grouped_mosaic_gpu import COUNTS, I, M, O


def geglu(gate, up):
    return jax.nn.gelu(gate) * up


COMBINES = {"silu": ops.swiglu, "clamped": ops.ClampedSwiGLU(limit=1.0), "gelu": geglu}


def arrays(M, I, O, E, dtype=np.float32, *, weight_order="EOI", biased=False):
    """Rows, gate, up, biases and the gradient of the result."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))
    shape = (E, O, I) if weight_order == "EOI" else (E, I, O)
    biases = (draw(E, O), draw(E, O)) if biased else ()
    return draw(M, I), 0.1 * draw(*shape), 0.1 * draw(*shape), biases, draw(M, O)


def in_float64(rows, gate, up, biases, d_out, counts, activation, weight_order="EOI"):
    """The result and the gradients of rows, gate, up and biases, from a loop over experts for each matmul."""
    turn = lambda w: np.asarray(w, np.float64).swapaxes(*((1, 2) if weight_order == "EIO" else (1, 1)))
    is_routed = np.arange(len(rows)) < np.cumsum(counts)[:, None]
    is_routed[1:] &= ~is_routed[:-1]  # E M
    operands = rows.at[sum(counts) :].set(0), *map(turn, (gate, up))
    products = [loop(operands[0], w, counts, d_out)[0] for w in operands[1:]]
    products = (
        [y + is_routed.T @ np.asarray(b, np.float64) for y, b in zip(products, biases, strict=True)]
        if biases
        else products
    )
    with jax.enable_x64(True):
        out, pull = jax.vjp(activation, *products)
        d_gate, d_up = map(np.asarray, pull(np.where(is_routed.any(0)[:, None], np.asarray(d_out, np.float64), 0)))
    (_, gate_rows, of_gate), (_, other, of_up) = (
        loop(operands[0], w, counts, d) for w, d in zip(operands[1:], (d_gate, d_up), strict=True)
    )
    d_biases = [is_routed.astype(float) @ d for d in (d_gate, d_up)] if biases else []
    return [np.asarray(out), gate_rows + other, turn(of_gate), turn(of_up), *d_biases]


def value_and_gradients(run, rows, gate, up, biases, d_out):
    out, pull = jax.vjp(run, rows, gate, up, biases)
    return jax.tree.leaves((out, pull(d_out)))


def by_op(counts, **options):
    names = ("gate_bias", "up_bias")
    return lambda rows, gate, up, biases: ops.grouped_glu(
        rows, gate, up, counts, **dict(zip(names, biases, strict=False)), **options
    )


def by_kernel(counts, weight_order, activation):
    return lambda rows, gate, up, biases: glu(rows, gate, up, counts, biases, weight_order, activation)


@pytest.mark.parametrize("implementation", ["tiled", pytest.param("reference", marks=pytest.mark.full)])
def test_equals_the_formula(implementation):
    options = {"activation": ops.ClampedSwiGLU(limit=1.0), "weight_order": "EIO"}
    inputs, counts = arrays(70, 5, 7, 3, weight_order="EIO", biased=True), [33, 0, 21]
    run = by_op(jnp.array(counts), implementation=implementation, **options)
    close(jax.jit(functools.partial(value_and_gradients, run))(*inputs), in_float64(*inputs, counts, **options))


# ---------------------------------------------------------------------------------------------- the kernel


@pytest.fixture
def emulated(monkeypatch):
    emulator.install(monkeypatch, by_rows, by_experts)
    monkeypatch.setattr(by_rows, "processors", lambda: 2)


@no_gpu
@pytest.mark.parametrize(
    ("name", "weight_order", "biased", "counts_of"),
    [
        ("clamped", "EIO", True, ["uneven"]),
        pytest.param("silu", "EOI", False, COUNTS, marks=pytest.mark.full),
    ],
)
def test_the_kernels_code_equals_the_formula(emulated, name, weight_order, biased, counts_of):
    """Values alone are joined in the kernel; with gradients it writes gate and up."""
    inputs, activation = arrays(M, I, O, 4, weight_order=weight_order, biased=biased), COMBINES[name]
    kernel = lambda counts: by_kernel(counts, weight_order, emulator.in_numpy(activation))
    alone = jax.jit(lambda counts, *inputs: kernel(counts)(*inputs))
    both = jax.jit(lambda counts, *inputs: value_and_gradients(kernel(counts), *inputs))
    for about in counts_of:
        counts = COUNTS[about]
        want = in_float64(*inputs, counts, activation, weight_order)
        spoiled = inputs[0].at[sum(counts) :].set(jnp.nan), *inputs[1:]  # rows of no expert need not be finite
        if about in ("uneven", "less than a tile each", "nothing"):
            close([alone(jnp.array(counts), *spoiled[:4])], want[:1])
        if about in ("uneven", "rows left over"):
            close(both(jnp.array(counts), *spoiled), want)


def shapes(dtype=jnp.bfloat16, *, weight_order="EOI", biased=False):
    """Of rows, gate, up, biases and the gradient: others than those above, whose traces are the emulator's."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    matrix = array(dtype, 4, O, I) if weight_order == "EOI" else array(dtype, 4, I, O)
    biases = (array(dtype, 4, O),) * 2 if biased else ()
    return array(jnp.bfloat16, 1000, I), matrix, matrix, biases, array(jnp.bfloat16, 1000, O)


def lowered(fn, *inputs) -> str:
    check = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    return export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=[check])(*inputs).mlir_module()


@no_gpu
@pytest.mark.parametrize(
    "name", ["clamped", *(pytest.param(name, marks=pytest.mark.full) for name in ("silu", "gelu"))]
)
def test_the_kernel_lowers(name):
    run = by_kernel(jnp.array([500, 0, 300, 100]), "EOI", COMBINES[name])
    text = lowered(run, *shapes(biased=name == "clamped")[:4])
    assert text.count("@mosaic_gpu_v2(") == 1


@no_gpu
@pytest.mark.full
def test_its_gradients_lower():
    run = by_kernel(jnp.array([500, 0, 300, 100]), "EIO", ops.swiglu)
    text = lowered(functools.partial(value_and_gradients, run), *shapes(jnp.float32, weight_order="EIO", biased=True))
    assert text.count("@mosaic_gpu_v2(") == 4  # gate and up, the gradient of the rows, those of gate and of up


@no_gpu
@pytest.mark.full
@pytest.mark.parametrize(("policy", "runs"), [("minimal", 1), ("full", 2)])
def test_remat_decides_what_is_kept(policy, runs):
    run = jax.checkpoint(
        by_kernel(jnp.array([500, 0, 300, 100]), "EOI", ops.swiglu), policy=nn.remat.remat_policy(policy)
    )
    loss = lambda *inputs: (run(*inputs).astype(jnp.float32) ** 2).sum()
    text = lowered(jax.grad(loss, argnums=(0, 1, 2)), *shapes()[:4])
    assert text.count("@mosaic_gpu_v2(") == runs + 3  # the gradients of rows, gate and up


def exact(gate, up):
    return nn.vision.exact_gelu(gate) * up


@no_gpu
def test_an_activation_that_the_kernel_cannot_apply_runs_outside_of_it(monkeypatch):
    """On Hopper, where the fused kernel is the default: another kernel multiplies, and XLA applies the activation."""
    device = ("gpu", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(api, "current_device", lambda: device)
    counts = jnp.array([500, 0, 300, 100])
    fused, run = [], glu_module._grouped_glu
    monkeypatch.setattr(
        glu_module, "_grouped_glu", lambda *args, **how: fused.append(how["activation"]) or run(*args, **how)
    )
    inputs = shapes()[:4]
    for activation in (ops.swiglu, ops.geglu, COMBINES["clamped"], exact):
        assert "@mosaic_gpu_v2(" in lowered(by_op(counts, activation=activation), *inputs)
    assert fused == [ops.swiglu, ops.geglu, COMBINES["clamped"]]
    with pytest.raises(NotImplementedError, match="erfc"):
        lowered(by_kernel(counts, "EOI", exact), *inputs)


def test_clear_errors():
    unchecked = inspect.unwrap(ops.grouped_glu)  # the shape checker of the tests would be first
    rows, gate, up, (bias, _), _ = arrays(8, 5, 7, 2, biased=True)
    call = functools.partial(unchecked, rows, gate, activation=ops.swiglu)
    with pytest.raises(ValueError, match=r"up must have the axes E O I with E=2, O=7, I=5, got shape \(2, 6, 5\)"):
        call(up[:, :6], jnp.array([4, 4]))
    with pytest.raises(ValueError, match="both biases must be given, or neither"):
        call(up, jnp.array([4, 4]), up_bias=bias)
    with pytest.raises(ValueError, match="one of .*reference.*got 'fast'"):
        call(up, jnp.array([4, 4]), implementation="fast")


# ---------------------------------------------------------------------------------------------- who calls it


def mixture(implementation, activation=ops.swiglu):
    layer = nn.MoE(64, 64, router=nn.Router(64, 4, top_k=2, rngs=nnx.Rngs(0)), activation=activation, rngs=nnx.Rngs(0))
    for part in (layer.gate, layer.up, layer.down):
        part.matmul = nn.matmul.PlainMatmul(implementation)
    return layer


@no_gpu
def test_a_mixture_of_experts_uses_it(emulated, monkeypatch):
    monkeypatch.setattr(api.GROUPED_MATMUL.__class__, "refusal", lambda *call: None)  # there is no GPU
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 10, 64)), jnp.float32)

    def run(layer):  # gradients are in test_equals_the_formula and test_the_kernels_code_equals_the_formula
        return [jax.jit(lambda layer, x: layer(x)[0])(layer, x)]

    layer = mixture("mosaic_gpu", emulator.in_numpy(ops.swiglu))
    assert str(jax.make_jaxpr(lambda x: layer(x)[0])(x)).count("pure_callback[") == 2  # gate and up, and down
    other = mixture("tiled")
    close(run(layer), run(other))
    flops = lambda layer: forward_flops(lambda layer, x: layer(x)[0], layer, x)
    assert flops(layer) == flops(other)


@gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_on_a_gpu_the_kernel_equals_the_formula(dtype):
    tol = 4 * float(jnp.finfo(dtype).eps)
    # Where a value is clamped, rounding decides on a whole derivative: here none is.
    for activation, weight_order, biased in ((ops.swiglu, "EOI", False), (ops.ClampedSwiGLU(limit=50.0), "EIO", True)):
        inputs = arrays(M, I, O, 4, dtype, weight_order=weight_order, biased=biased)
        for counts in COUNTS.values():
            run = by_kernel(jnp.array(counts), weight_order, activation)
            want = in_float64(*inputs, counts, activation, weight_order)
            close([jax.jit(run)(*inputs[:4])], want[:1], tol)
            close(jax.jit(functools.partial(value_and_gradients, run))(*inputs), want, tol)
