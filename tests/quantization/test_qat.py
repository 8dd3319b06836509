"""Quantization-aware training: the forward pass is that of the stored model, the gradient that of its weights."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxlib import nn, training
from maxlib import quantization as quant
from maxlib.quantization._matmul import _emulated_operands, four_bit_floats
from tests.quantization.tiny import model, shapes
from tests.training import tiny

INT4 = quant.Format("int4", group=16)


@jax.jit
@jax.value_and_grad
def loss_and_gradients(trainable, rest):
    batch = jax.tree.map(jnp.asarray, tiny.batch())
    return training.NextToken()(nn.combine(trainable, rest), batch, dtype=jnp.float64)[0]


@pytest.mark.parametrize("name", ["llama", pytest.param("both", marks=pytest.mark.full)])
def test_it_trains_the_model_that_will_run(name):
    """Loss and gradients are those of a plain model with the weights that `for_inference` stores. Compilers add float32
    in another order in each program, so float64 compares the two.
    """
    stored = jax.jit(lambda m: quant.full_precision(quant.for_inference(m, INT4)))(model(name))
    models = quant.for_training(model(name), INT4), stored, model(name)
    with jax.enable_x64(True):
        (loss, gradients), (want, want_gradients), (exact, _) = (loss_and_gradients(*in_float64(m)) for m in models)
        assert float(loss) == pytest.approx(float(want), rel=1e-13) and abs(loss / exact - 1) > 1e-3
    for path, gradient in want_gradients.items():
        largest = float(np.abs(gradient).max())
        np.testing.assert_allclose(gradients[path], gradient, rtol=0, atol=1e-12 * largest, err_msg=path)


def in_float64(model):
    trainable, rest = nn.partition(model)
    return {path: w.astype(jnp.float64) for path, w in trainable.items()}, rest


def by_definition(w, kind):
    """In numpy, with the types of ml_dtypes."""
    groups = w.reshape(len(w), -1, 16 if kind == "nvfp4" else 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    if kind == "mxfp4":
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    else:
        of_all = np.abs(w).max() / np.float32(6 * 448)
        scale = (largest / (6 * of_all)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * of_all
    numbers = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (numbers * scale).reshape(w.shape)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_four_bit_floats(kind):
    w = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    np.testing.assert_allclose(four_bit_floats(jnp.asarray(w), kind), by_definition(w, kind), rtol=1e-6)


def test_activations_are_rounded_for_each_row_and_pass_gradients():
    x, w, d = (np.random.default_rng(i).standard_normal((4, 32), np.float32) for i in range(3))

    @jax.jit
    def rounded(x):
        return _emulated_operands("BI,OI->BO", x, jnp.asarray(w), quant.TRAINING["int4_w4a8_qat"])[0]

    low, pull = jax.vjp(rounded, jnp.asarray(x))
    scale = np.abs(x).max(axis=1, keepdims=True) / 127.5
    np.testing.assert_allclose(low, np.clip(np.rint(x / scale), -127, 127) * scale, rtol=1e-6)
    np.testing.assert_array_equal(pull(jnp.asarray(d))[0], d)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (quant.TRAINING["nvfp4_qat"], "nvfp4 and mxfp4 are for training"),
        (quant.TRAINING["int4_w4a8_qat"], "with rounded activations, stored weights must be of 8 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused(format, message):
    with pytest.raises(ValueError, match=message):
        quant.for_inference(shapes("llama"), [quant.Rule(format, "layers.mlp.*")])


def test_groups_of_four_bit_floats_are_fixed():
    with pytest.raises(ValueError, match="nvfp4 has groups of 16, got 32"):
        quant.Format("nvfp4", group=32)
    with pytest.raises(ValueError, match="gradients and blocks need weights in one of"):
        quant.Format("int4", "int8", "int8", group=32)
