"""Training in NVFP4: values by the format's formula, products and gradients in float64, random rounding, rotation."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlib import nn
from maxlib import quantization as quant
from maxlib.quantization import _blocks
from maxlib.quantization._matmul import Quantized
from tests.quantization.test_blocks import draw, lowered
from tests.quantization.tiny import model, value_and_gradients

NVFP4 = quant.TRAINING["nvfp4"]


def rounded(x, sides):
    """Rounds block by block, with the types of ml_dtypes; returns values, scales of their blocks, scale of all."""
    x = np.asarray(x, np.float32)
    of_all = np.float32(np.abs(x).max() / np.float32(6 * 448))
    values, scales = np.zeros_like(x), np.zeros_like(x)
    for at in np.ndindex(*(-(-size // side) for size, side in zip(x.shape, sides, strict=True))):
        block = tuple(slice(i * side, (i + 1) * side) for i, side in zip(at, sides, strict=True))
        scale = (np.abs(x[block]).max() / (6 * of_all)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scales[block] = scale if scale > 0 else 1
        values[block] = np.clip(x[block] / (scales[block] * of_all), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return values, scales, of_all


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("sides", [(1, 16), (16, 16), (16, 1)], ids=str)
def test_blocks_equal_the_formula_bit_for_bit(sides):
    x = draw(0, 40, 72).at[:, 40].set(0).at[3].multiply(1e-6)  # a last block that is cut off, zeros, a tiny row
    blocks = jax.jit(_blocks.quantize, static_argnums=(1, 2))(x, "nvfp4", sides)
    values, scales, of_all = rounded(x, sides)
    np.testing.assert_array_equal(blocks.values, values)
    np.testing.assert_array_equal(blocks.within(jnp.bfloat16).astype(jnp.float32), values * scales)
    np.testing.assert_array_equal(blocks.restored(jnp.float32), values * (scales * of_all))


def test_gradients_are_rounded_to_a_neighbour_with_the_exact_mean():
    x = jnp.asarray(np.random.default_rng(0).uniform(-6, 6, 400), jnp.float32).at[:3].set(jnp.array([6, -6, 1.5]))
    draws = jax.jit(jax.vmap(lambda key: _blocks._rounded_at_random(x, jax.random.uniform(key, x.shape))))
    low = np.asarray(draws(jax.random.split(jax.random.key(0), 4000)))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert np.isin(np.abs(low), grid).all()
    assert all(len(np.unique(column)) <= 2 for column in low.T) and (low[:, :3] == np.array([6, -6, 1.5])).all()
    np.testing.assert_allclose(low.mean(axis=0), x, atol=5 / np.sqrt(4000))


def test_noise_is_repeated_for_the_same_gradient_only():
    x = draw(0, 64, 32)
    a, b, c = (_blocks._noise(array) for array in (x, x, x.at[0, 0].add(1e-3)))
    np.testing.assert_array_equal(a, b)
    assert abs(np.corrcoef(np.ravel(a), np.ravel(c))[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("spec", "of_x", "of_w"), [("BTD,FD->BTF", (2, 40, 72), (48, 72)), ("BTNH,DNH->BTD", (2, 24, 3, 32), (48, 3, 32))]
)
def test_products_and_gradients_equal_float64_on_the_same_blocks(spec, of_x, of_w):
    """Each operand is what `quantize` makes of it; the weight's gradient is of rotated operands."""
    x, w = normal(1, *of_x), normal(2, *of_w)
    d = normal(3, *jax.eval_shape(lambda: jnp.einsum(spec, x, w)).shape)
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    y, dx, dw = value_and_gradients(functools.partial(Quantized(NVFP4).einsum, spec), d, x, w)

    def low(a, letters, along, **options):
        sides = tuple(16 if letter in along else 1 for letter in letters)
        return _blocks.quantize(a, "nvfp4", sides, **options).restored(jnp.float32)

    @jax.jit
    def operands(d, x, w):
        inner, outer = of_w[-1], next(letter for letter in reversed(of_w) if letter not in of_x)
        left, right = (_blocks._rotated(a, letters.index("T")) for a, letters in ((d, of_y), (x, of_x)))
        forward = low(w, of_w, inner + outer), low(x, of_x, inner), low(d, of_y, outer, stochastic=True)
        return *forward, low(left, of_y, "T", stochastic=True), low(right, of_x, "T")

    square, across, back, left, right = (np.asarray(a, np.float64) for a in operands(d, x, w))
    want = np.einsum(spec, across, square)
    want_dx = np.einsum(f"{of_y},{of_w}->{of_x}", back, square)
    want_dw = np.einsum(f"{of_y},{of_x}->{of_w}", left, right)
    for got, of_float64 in ((y, want), (dx, want_dx), (dw, want_dw)):
        np.testing.assert_allclose(got, of_float64, rtol=1e-5, atol=1e-5 * np.abs(of_float64).max())
    for got, exact in zip((y, dx, dw), value_and_gradients(functools.partial(jnp.einsum, spec), d, x, w), strict=True):
        assert 0.05 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.3


def test_rotation_changes_no_product():
    a, b = draw(0, 40, 8), draw(1, 40, 6)  # 40 rows: the last block is filled with zeros
    rotated = [np.asarray(_blocks._rotated(m, 0), np.float64) for m in (a, b)]
    exact = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)
    np.testing.assert_allclose(rotated[0].T @ rotated[1], exact, atol=1e-5 * np.abs(exact).max())
    spread = np.abs(_blocks._rotated(jnp.zeros(16).at[3].set(4.0), 0))
    np.testing.assert_allclose(spread, 1.0)  # an outlier is shared by the block


def test_experts_and_a_stack_train_in_four_bits():
    low = quant.for_training(model("both"), "nvfp4")
    formats = [row.format for row in quant.report(low).rows if ".mlp.experts" in row.path or ".attn.q" in row.path]
    assert formats and {None, "nvfp4 in blocks of 16 x nvfp4 d nvfp4"} == {*formats}  # the last layer is left
    d, rows, w, counts = normal(3, 48, 16), normal(1, 48, 32), normal(2, 3, 16, 32), jnp.array([20, 0, 25])
    low = value_and_gradients(lambda x, w: Quantized(NVFP4).grouped(x, w, counts), d, rows, w)
    exact = value_and_gradients(lambda x, w: nn.matmul.PlainMatmul().grouped(x, w, counts), d, rows, w)
    for got, want in zip(low, exact, strict=True):
        assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.3


def test_last_layers():
    assert quant.LastLayers(0.15)(4) == (3,) and quant.LastLayers(0.15)(40) == (34, 35, 36, 37, 38, 39)


def test_blackwell_gets_matmuls_of_nvfp4():
    text = lowered("NVIDIA B200", NVFP4)
    assert text.count("__op$block_scaled_dot") == 3 and "f4E2M1FN" in text and "f8E4M3FN" in text
    assert "block_scaled_dot" not in lowered("NVIDIA H100 80GB HBM3", NVFP4)


@pytest.mark.parametrize("options", [{"block": 32}, {"activations": "int8"}, {"gradients": None}, {"block": None}])
def test_formats_of_other_kinds(options):
    nvfp4 = {"weights": "nvfp4", "activations": "nvfp4", "gradients": "nvfp4", "block": 16}
    with pytest.raises(ValueError, match="nvfp4 rounds weights, activations and gradients in blocks of 16"):
        quant.Format(**(nvfp4 | options))
