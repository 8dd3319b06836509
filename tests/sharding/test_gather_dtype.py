"""FSDP whose all-gathers move 8 bits: bytes in the compiled program, and the loss."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, sharding, training
from tests.training import tiny

EIGHT = sharding.strategies.FullyShard(gather_dtype="float8_e4m3fn")
BYTES = {"u8": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}


def value_and_grad(strategy, remat):
    """Returns the loss, gradients, and bytes of the compiled all-gathers by dtype."""
    model, batch = tiny.llama(dim=64, mlp_dim=128), jax.tree.map(jnp.asarray, tiny.batch(rows=8))
    layout = sharding.Layout(sharding.make_mesh(fsdp=8), strategy)
    with sharding.use(layout):
        trainable, rest = nn.partition(jax.device_put(model, sharding.shardings(model, layout)))

        def total(trainable):
            return training.NextToken()(nn.combine(trainable, rest), batch, dtype=jnp.bfloat16, remat=remat)[0]

        compiled = jax.jit(jax.value_and_grad(total)).lower(trainable).compile()
        gathered = {}
        for kind, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text()):
            size = BYTES[kind] * np.prod([int(n) for n in shape.split(",") if n], dtype=int)
            gathered[kind] = gathered.get(kind, 0) + int(size)
        return *compiled(trainable), gathered


@pytest.mark.parametrize("remat", ["full", pytest.param(None, marks=pytest.mark.full)])
def test_weights_are_gathered_in_eight_bits(remat):
    loss, gradients, wide = value_and_grad(sharding.FSDP, remat)
    low_loss, low_gradients, narrow = value_and_grad(EIGHT, remat)
    print(wide, narrow)
    assert "u8" not in wide and sum(narrow.values()) < 0.7 * sum(wide.values())
    assert abs(low_loss / loss - 1) < 2e-3 and low_loss != loss
    for path, gradient in gradients.items():
        error = float(jnp.linalg.norm(low_gradients[path] - gradient) / jnp.linalg.norm(gradient))
        assert error < 0.1, path


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="gather_dtype must be None, 'float8_e4m3fn' or 'float8_e5m2'; got 'int4'"):
        sharding.strategies.FullyShard(gather_dtype="int4")
