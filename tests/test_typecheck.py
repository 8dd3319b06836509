"""The import hook of the tests: wrong shapes and silent broadcasts are caught, values that JAX rebuilds pass."""

import jax
import jax.numpy as jnp
import pytest

from maxlib import nn, ops, training


def test_a_wrong_shape_is_caught():
    q, k = jnp.zeros((1, 4, 2, 8)), jnp.zeros((2, 4, 2, 8))
    with pytest.raises(TypeError, match="maxlib.ops._attention"):
        ops.attention(q, k, k)


def test_a_wrong_type_is_caught_where_no_shapes_are_named():
    with pytest.raises(TypeError, match="window"):
        ops.SlidingWindow(4.5)
    with pytest.raises(TypeError, match="learning_rate"):
        training.adamw("1e-3")


def test_a_wrong_field_is_caught():
    ctx = nn.make_context(2, 4)
    with pytest.raises(TypeError, match="length"):
        type(ctx)(ctx.positions, ctx.index, ctx.start, ctx.stop, length=ctx.positions, num_new=ctx.num_new)


def test_values_that_jax_rebuilds_pass():
    contexts = jax.vmap(lambda _: nn.make_context(2, 4))(jnp.arange(3))
    assert jax.tree.map(jnp.shape, contexts).length == (3, 2)
    _, lengths = jax.lax.scan(lambda carry, ctx: (carry, ctx.key_intervals(ops.Causal())[1]), None, contexts)
    assert lengths.shape == (3, 2, 4)


def test_silent_broadcasting_is_caught():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
