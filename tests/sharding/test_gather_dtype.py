"""FSDP whose all-gathers move 8 bits: bytes in the compiled program, and the loss."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding, training
from maxlib.sharding._strategy import ShardedWeight, StepFacts
from tests.training import tiny
from tests.training.tiny import VOCAB

EIGHT = sharding.strategies.FullyShard(gather_dtype="float8_e4m3fn")
BYTES = {"u8": 1, "f32": 4, "pred": 1}


def rounded(model):
    """Returns the model with the matrices that are gathered in 8 bits rounded, by numpy."""

    def low(path, variable):
        axes, value = variable.get_metadata().get("axes", ()), np.asarray(variable.get_value())
        if len(sharding.layers.own_axes(axes)) < 2 or "vocab" in axes:
            return variable
        others = tuple(d for d, name in enumerate(axes) if name not in ("layers", "embed"))
        scale = np.abs(value).max(axis=others, keepdims=True) / np.float32(448)
        return variable.replace(jnp.asarray((value / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale))

    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree_util.tree_map_with_path(low, model, is_leaf=is_variable)


def value_and_grad(model, strategy, remat):
    """Returns the loss, gradients, and bytes of the compiled all-gathers by dtype."""
    batch, layout = jax.tree.map(jnp.asarray, tiny.batch(rows=8)), sharding.Layout(sharding.make_mesh(fsdp=8), strategy)
    with sharding.use(layout):
        trainable, rest = nn.partition(jax.device_put(model, sharding.shardings(model, layout)))

        def total(trainable):
            return training.NextToken()(nn.combine(trainable, rest), batch, dtype=jnp.float32, remat=remat)[0]

        compiled = jax.jit(jax.value_and_grad(total)).lower(trainable).compile()
        gathered = {}
        for kind, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text()):
            size = BYTES[kind] * np.prod([int(n) for n in shape.split(",") if n], dtype=int)
            gathered[kind] = gathered.get(kind, 0) + int(size)
        return *compiled(trainable), gathered


# Where layers are recomputed, most weights are gathered three times instead of twice.
@pytest.mark.parametrize(("remat", "gathers"), [("full", 1.37), pytest.param(None, 1.0, marks=pytest.mark.full)])
def test_weights_are_gathered_in_eight_bits(remat, gathers):
    """The loss and gradients are those of weights that numpy rounds."""
    model = tiny.llama(dim=64, mlp_dim=128)
    loss, gradients, wide = value_and_grad(rounded(model), sharding.FSDP, remat)
    low_loss, low_gradients, narrow = value_and_grad(model, EIGHT, remat)
    matrices = wide["f32"] - 4 * VOCAB * 64  # without the embedding
    assert "u8" not in wide and narrow["u8"] <= gathers * matrices / 4
    assert narrow["f32"] <= 4 * VOCAB * 64 + 0.2 * matrices  # and the scales, which are many in so small a model
    np.testing.assert_allclose(low_loss, loss, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(
            low_gradients[path], gradient, atol=1e-5 * float(jnp.abs(gradient).max()), err_msg=path
        )


def test_plans_count_eight_bits_for_what_is_rounded():
    def sharded(*axes):
        return ShardedWeight({"fsdp"}, {"fsdp"}, 100.0, 1.0, True, axes)

    weights = (sharded("mlp", "embed"), sharded("vocab", "embed"), sharded("expert", "mlp", "embed"), sharded("embed"))
    step = StepFacts(None, "cpu", 1, 1.0, 2, 1.0, 1.0, 2, 1.0, weights, (), (), 0.0, 0.0)  # a width of two bytes
    gathers = [size for kind, _, size in EIGHT.traffic(step) if kind == "all-gather"]
    assert gathers == [100.0, 200.0, 200.0, 200.0]


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="gather_dtype must be None, 'float8_e4m3fn' or 'float8_e5m2'; got 'int4'"):
        sharding.strategies.FullyShard(gather_dtype="int4")
