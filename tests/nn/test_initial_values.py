"""Initial values: those of flax's initializers to the bit, from one compiled program for arrays of all shapes."""

import dataclasses
import functools
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import ops
from maxlib.models import llama
from maxlib.nn import _initial_values
from tests.nn.tiny import LLAMA

SHAPES = [(1, 5, 3), (300, 250)]  # the last has more values than the program draws
FAN_IN = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_flax_to_the_bit(shape):
    keys = jax.random.split(jax.random.key(3), 2)
    fan_in = np.prod(shape) // shape[1]
    pairs = [
        (_initial_values.normal(0.02), nnx.initializers.normal(0.02)),
        (_initial_values.truncated_normal(int(fan_in), FAN_IN), FAN_IN),
    ]
    for inits in pairs:
        ours, theirs = (functools.partial(init, shape=shape, dtype=jnp.float32) for init in inits)
        expected = np.stack([theirs(key) for key in keys])
        ulps = 0 if version("jax").startswith("0.10.") else 1  # jax 0.12 compiles single operations otherwise
        np.testing.assert_array_max_ulp(np.asarray(ours(keys[0])), expected[0], ulps)
        np.testing.assert_array_max_ulp(np.asarray(jax.vmap(ours)(keys)), expected, ulps)
        np.testing.assert_array_equal(jax.jit(ours)(keys[0]), jax.jit(theirs)(keys[0]))


def test_another_generator_of_numbers_draws_each_shape_alone():
    key = jax.random.key(0, impl="rbg")
    expected = nnx.initializers.normal(0.02)(key, (5, 3), jnp.float32)
    np.testing.assert_array_equal(_initial_values.normal(0.02)(key, (5, 3), jnp.float32), expected)


def test_matrices_of_a_model_do_not_compile_one_by_one():
    """A program for each shape was nine tenths of the time to build a small model."""
    compiled = []

    def listen(event, seconds, **_):
        compiled.append(event) if event.endswith("backend_compile_duration") else None

    llama.Llama(LLAMA, rngs=nnx.Rngs(0))
    other_widths = dataclasses.replace(LLAMA, vocab=37, dim=29, mlp_dim=41, head_dim=6, rope=ops.Rope(6))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        llama.Llama(other_widths, rngs=nnx.Rngs(0))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) <= 2  # the scales of norms, in layers and after them; not the nine matrices
