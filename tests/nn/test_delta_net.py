"""What only Gated DeltaNet has: its traffic, plans and initial rates, and generation by a family with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, plan, sharding
from maxlib.models import qwen3_5
from maxlib.ops import Rope
from maxlib.sharding.strategies import SplitSequence
from tests.nn.recurrences import DELTA, DIM, X, layer, run


def tiny(**changes) -> qwen3_5.Config:
    sizes = dict(vocab=40, num_layers=4, dim=DIM, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=16)
    delta = dict(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
    return qwen3_5.Config(**sizes, **delta, rope=Rope(4, max_length=128), **changes)


def test_what_a_state_cannot_do_is_refused():
    model = jax.eval_shape(lambda: qwen3_5.Qwen35(tiny(), rngs=nnx.Rngs(0)))
    assert not model.layers.is_reorderable  # zigzag order
    with pytest.raises(ValueError, match="GatedDeltaNet cannot store a state in int8"):
        model.init_cache(1, 8, dtype=jnp.int8)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_key_heads"):
        nn.GatedDeltaNet(DIM, **DELTA | {"num_heads": 3}, rngs=nnx.Rngs(0))


def test_one_head_is_a_layer():
    alone = nn.GatedDeltaNet(DIM, num_heads=1, key_dim=8, value_dim=6, rngs=nnx.Rngs(0))
    assert np.isfinite(run(alone, X)).all()


@pytest.mark.full
def test_plans_know_what_travels():
    """With a sequence over four devices: transitions and states in place of tokens."""
    base = {"target": "h100x4", "sequence": 64, "layout": sharding.Layout({"context": 4}, sharding.CP_RING)}
    bytes_of = lambda **changes: sum(
        one.bytes
        for one in plan.estimated(
            plan.Job(model=lambda: qwen3_5.Qwen35(tiny(**changes), rngs=nnx.Rngs(0)), **base)
        ).costs.collectives
        if "context" in one.axes and one.kind == "all-gather"
    )
    linear = bytes_of(layer_types=(qwen3_5.LINEAR,) * 4)
    rows, passes, parts = 4, 3, 4  # a row for each device
    one = (passes - 1) * rows * parts * (4 * 4 * 8 * (8 + 8) + 3 * (2 * 2 * 8 + 4 * 8) * 2)
    assert linear - bytes_of(layer_types=(qwen3_5.FULL,) * 4) == pytest.approx(4 * one)


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device, in float32: N transitions [Hk, Hk] and states [Hk, Hv]; and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    floats, inputs = 4 * (8 * 8 + 8 * 6), 3 * (2 * 8 + 2 * 8 + 4 * 6)  # N = 4; queries and keys of two heads, values
    whole = 3 * 4 * (4 * floats + 2 * inputs) / 2
    assert layer("delta").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_rates_are_drawn_from_1_to_16():
    """As the reference: A is uniform in [1, 16), and its log is stored."""
    rates = np.exp(nn.GatedDeltaNet(8, **DELTA | {"num_heads": 512}, rngs=nnx.Rngs(0)).a_log[...])
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16
    np.testing.assert_allclose(rates.mean(), 8.5, atol=0.5)
