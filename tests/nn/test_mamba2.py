"""What only Mamba-2 and gated short convolutions have: limits of a step, their traffic, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding
from maxlib.sharding.strategies import SplitSequence
from tests.nn.recurrences import DIM, MAMBA, X, layer, run


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_groups"):
        nn.Mamba2(DIM, **MAMBA, num_groups=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="conv_width must be at least 2"):
        nn.ShortConvolution(DIM, conv_width=1, rngs=nnx.Rngs(0))


def test_steps_stay_within_their_limits():
    """With a least step the state forgets faster; the greatest one bounds what a token writes."""
    plain = layer("mamba")
    limited = jax.tree.map(lambda a: a, plain)
    limited.dt_limit = (0.5, 0.6)
    dt = limited._step(limited.dt(jnp.asarray(X)))
    assert float(dt.min()) == 0.5 and float(dt.max()) == np.float32(0.6)
    assert np.abs(run(limited, X) - run(plain, X)).max() > 0.1


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device: N transitions and states [P, S] in float32, and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    inputs = 3 * (4 * 6 + 2 * 2 * 8)  # x of N heads; b and c of two groups
    whole = 3 * 4 * (4 * 4 * (1 + 6 * 8) + 2 * inputs) / 2
    assert layer("groups").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_a_convolution_sends_its_last_inputs():
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    width = layer("convolution").conv_width
    whole = 3 * 4 * (width - 1) * DIM * 2
    assert width > 2 and layer("convolution").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}
