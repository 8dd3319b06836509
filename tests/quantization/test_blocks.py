"""Blockwise rounding against numpy and float64, products and gradients, and the programs for Blackwell GPUs."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxlib import nn, ops
from maxlib import quantization as quant
from maxlib.quantization import _blocks
from maxlib.quantization._matmul import Quantized
from tests.quantization.tiny import model, shapes, value_and_gradients

BLOCK = quant.TRAINING["fp8_block"]
E5M2 = quant.Format("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", block=32)
INT8 = quant.Format("int8", "int8", "int8", block=64)


def rounded(x, kind, sides):
    """Rounds block by block, in plain loops in float64; powers of two as scales."""
    dtype = np.dtype(kind) if kind == "int8" else np.dtype(getattr(ml_dtypes, kind))
    most = 127 if kind == "int8" else float(ml_dtypes.finfo(dtype).max)
    x, out = np.asarray(x, np.float64), np.zeros(x.shape)
    for at in np.ndindex(*(-(-size // side) for size, side in zip(x.shape, sides, strict=True))):
        block = tuple(slice(i * side, (i + 1) * side) for i, side in zip(at, sides, strict=True))
        largest = np.abs(x[block]).max()
        scale = 2.0 ** np.ceil(np.log2(largest / most)) if largest else 1.0
        values = np.round(x[block] / scale) if kind == "int8" else x[block] / scale
        out[block] = values.astype(np.float32).astype(dtype).astype(np.float64) * scale
    return out


def draw(seed, *shape):
    """Draws normal numbers whose sizes differ by line and by column, as outliers do."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    for dim, size in enumerate(shape):
        x *= np.exp(rng.standard_normal(size)).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return jnp.asarray(x, jnp.float32)


KINDS, SIDES = ("float8_e4m3fn", "float8_e5m2", "int8"), ((1, 32), (32, 32), (128, 1))


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        pytest.param(kind, sides, marks=() if KINDS.index(kind) == SIDES.index(sides) else pytest.mark.full)
        for kind in KINDS
        for sides in SIDES
    ],
    ids=str,
)
def test_blocks_are_rounded_as_numpy_rounds_them(kind, sides):
    x = draw(0, 70, 128).at[:, 40].set(0).at[3].multiply(1e-30)  # a last block that is cut off, zeros, and tiny rows
    q = jax.jit(_blocks.quantize, static_argnums=(1, 2))(x, kind, sides)
    assert q.kind == kind and q.scale.shape == tuple(-(-n // min(s, n)) for n, s in zip(x.shape, sides, strict=True))
    np.testing.assert_array_equal(q.values.astype(kind).astype(jnp.float32), q.values)  # a value of that type
    np.testing.assert_array_equal(q.restored(jnp.float32), rounded(x, kind, q.sides))
    np.testing.assert_array_equal(q.restored(jnp.bfloat16).astype(jnp.float32), q.restored(jnp.float32))


def test_scales_are_the_least_powers_of_two_that_hold_the_largest_value():
    most = float(jnp.finfo(jnp.float8_e4m3fn).max)
    x = jnp.array([[most], [1.01 * most], [2 * most], [0.0], [1e-44], [jnp.inf], [jnp.nan]])
    q = _blocks.quantize(x, "float8_e4m3fn", (1, 1))
    np.testing.assert_array_equal(q.scale[:4, 0], [1, 2, 2, 1])
    assert np.isfinite(q.restored(jnp.float32)[:5]).all() and not np.isfinite(q.restored(jnp.float32)[5:]).any()


SPECS = [
    ("BTD,FD->BTF", (2, 96, 160), (72, 160)),
    ("BTD,NHD->BTNH", (2, 96, 64), (3, 48, 64)),
    ("BTNH,DNH->BTD", (2, 96, 3, 64), (96, 3, 64)),
    ("BECD,EDF->BECF", (2, 3, 32, 64), (3, 64, 40)),
]


def reference(spec, x, w, d, format):
    """Computes the product and both gradients in float64, of operands that numpy rounds."""
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    last = lambda letters, others: [letter for letter in letters if letter not in others][-1]
    line = lambda a, kind, of, along: rounded(a, kind, [format.block if axis in along else 1 for axis in of])
    square = line(w, format.weights, of_w, last(of_w, of_y) + last(of_w, of_x))
    y = np.einsum(spec, line(x, format.activations, of_x, last(of_x, of_y)), square)
    dx = np.einsum(f"{of_y},{of_w}->{of_x}", line(d, format.gradients, of_y, last(of_w, of_x)), square)
    along = last(of_x, of_w)
    left, right = line(d, format.gradients, of_y, along), line(x, format.activations, of_x, along)
    return y, dx, np.einsum(f"{of_y},{of_x}->{of_w}", left, right)


# By default every product, and every format, once.
BY_DEFAULT = dict(zip((spec[0] for spec in SPECS), (BLOCK, E5M2, INT8, BLOCK), strict=True))
PRODUCTS = [
    pytest.param(
        *spec, format, id=f"{spec[0]}-{format}", marks=() if BY_DEFAULT[spec[0]] == format else pytest.mark.full
    )
    for spec in SPECS
    for format in (BLOCK, E5M2, INT8)
]


@pytest.mark.parametrize(("spec", "of_x", "of_w", "format"), PRODUCTS)
def test_products_and_gradients_equal_float64_on_the_same_blocks(spec, of_x, of_w, format):
    x, w = draw(1, *of_x), draw(2, *of_w)
    d = draw(3, *jax.eval_shape(lambda: jnp.einsum(spec, x, w)).shape)
    results = value_and_gradients(functools.partial(Quantized(format).einsum, spec), d, x, w)
    for got, want in zip(results, reference(spec, x, w, d, format), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    for got, want in zip(results, value_and_gradients(functools.partial(jnp.einsum, spec), d, x, w), strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        # e5m2 has a bit less; int8 loses what is small beside the outliers of its block.
        assert 0 < error < {BLOCK: 0.06, E5M2: 0.1, INT8: 0.25}[format]


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("EIO", BLOCK),
        ("EOI", E5M2),
        *(pytest.param(*p, marks=pytest.mark.full) for p in (("EOI", BLOCK), ("EIO", E5M2))),
    ],
    ids=str,
)
def test_grouped_products_and_gradients_equal_float64_on_the_same_blocks(layout, format):
    rows, counts, d = draw(1, 200, 64), np.array([93, 0, 90]), draw(3, 200, 48)
    w = draw(2, 3, 48, 64) if layout == "EOI" else draw(2, 3, 64, 48)
    unused = (np.arange(200) >= counts.sum())[:, None]
    inputs = [jnp.where(unused, jnp.nan, a) for a in (d, rows)]  # rows of no expert may hold anything
    multiply = lambda rows, w: Quantized(format).grouped(rows, w, jnp.asarray(counts), layout)
    results = value_and_gradients(multiply, *inputs, w)
    d, rows = (np.where(unused, 0, a) for a in (d, rows))
    side = format.block
    squares = np.asarray(rounded(w, format.weights, (1, side, side)))
    squares = squares if layout == "EOI" else squares.swapaxes(1, 2)  # E O I
    across, along = (rounded(rows, format.activations, sides) for sides in ((1, side), (side, 1)))
    back, down = (rounded(d, format.gradients, sides) for sides in ((1, side), (side, 1)))
    expert = np.repeat(np.arange(3), counts)
    y, dx, dw = np.zeros((200, 48)), np.zeros((200, 64)), np.zeros((3, 48, 64))
    for m, e in enumerate(expert):
        y[m], dx[m] = squares[e] @ across[m], back[m] @ squares[e]
        dw[e] += np.outer(down[m], along[m])
    for got, want in zip(results, (y, dx, dw if layout == "EOI" else dw.swapaxes(1, 2)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_exact_gradients_where_the_format_has_none():
    format, x, w, d = quant.Format("int8", "int8", block=32), draw(1, 8, 64), draw(2, 32, 64), draw(3, 8, 32)
    _, *results = value_and_gradients(functools.partial(Quantized(format).einsum, "...I,OI->...O"), d, x, w)
    _, *want = value_and_gradients(functools.partial(jnp.einsum, "...I,OI->...O"), d, x, w)
    for got, exact in zip(results, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-6)
    rows = lambda multiply: value_and_gradients(lambda x, w: multiply(x, w[None], jnp.array([8])), d, x, w)[1:]
    for got, exact in zip(rows(Quantized(format).grouped), rows(ops.grouped_matmul), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-6)


# ---------------------------------------------------------------------------------------------- Blackwell


def emulated(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
    """`jax.nn.scaled_matmul` as its documentation defines it, where the compiler has no such call."""
    assert lhs_scales.dtype == rhs_scales.dtype == jnp.float8_e8m0fnu
    assert lhs.shape[-1] == 32 * lhs_scales.shape[-1]  # what cuDNN takes
    spread = lambda x, scale: x.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), 32, axis=-1)
    y = jnp.einsum("BMK,BNK->BMN", spread(lhs, lhs_scales), spread(rhs, rhs_scales))
    return y.astype(preferred_element_type)


@pytest.mark.parametrize(
    ("spec", "of_x", "of_w", "format"), [p for p in PRODUCTS if p.values[3] != INT8 and "E" not in p.id[0:2]]
)
def test_scaled_matmuls_of_blackwell_compute_the_same_products(spec, of_x, of_w, format, monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", emulated)
    x, w = draw(1, *of_x), draw(2, *of_w)
    d = draw(3, *jax.eval_shape(lambda: jnp.einsum(spec, x, w)).shape)
    want = value_and_gradients(functools.partial(Quantized(format).einsum, spec), d, x, w)
    calls = []
    monkeypatch.setattr(_blocks, "is_blackwell", lambda kind: calls.append(kind) or True)
    results = value_and_gradients(lambda x, w: Quantized(format).einsum(spec, x, w), d, x, w)
    assert len(calls) == 3
    for got, other in zip(results, want, strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())


def lowered(kind: str, format: quant.Format = BLOCK) -> str:
    """Lowers a product and its gradients for a GPU that is not there."""
    device = AbstractDevice(kind, None, "gpu")
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    multiply = functools.partial(Quantized(format).einsum, "...I,OI->...O")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = value_and_gradients.trace(multiply, shape(2, 64, 256), shape(2, 64, 512), shape(256, 512))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_blackwell_gets_scaled_matmuls_and_hopper_bfloat16():
    assert lowered("NVIDIA B200").count("__op$block_scaled_dot") == 3
    hopper = lowered("NVIDIA H100 80GB HBM3")
    assert "block_scaled_dot" not in hopper
    # XLA for GPUs drops conversions to eight bits and back, and with them the rounding.
    assert "f8E4M3FN" not in hopper and hopper.count("reduce_precision") >= 5


# ------------------------------------------------------------------------------------------------- models


def test_every_matmul_says_its_blocks_and_full_precision_comes_back():
    low = quant.for_training(model("both"), "fp8_block")
    formats = {row.path: row.format for row in quant.report(low).rows}
    assert formats["layers.groups.0.0.attn.q"] == "float8_e4m3fn in blocks of 128 x float8_e4m3fn d float8_e4m3fn"
    assert {path for path, format in formats.items() if format is None} == {
        "embed",
        "head",
        "layers.groups.0.0.mlp.router.gate",
    }
    assert jax.tree.structure(quant.full_precision(low)) == jax.tree.structure(model("both"))
    assert nn.variables(low).keys() == nn.variables(model("both")).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 48, "activations": "int8"}, "block must be a multiple of 32"),
        ({"block": 128}, "need weights in one of .* and rounded activations"),
    ],
)
def test_blocks_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        quant.Format("int8", **options)


def test_blocks_are_not_stored():
    with pytest.raises(ValueError, match="blocks, nvfp4 and mxfp4 are for training"):
        quant.for_inference(shapes("llama"), BLOCK)
