"""Moments in eight bits: their size, their error, their mean, and training with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, ops, sharding, training
from maxlib.training._moments import _restored, _scaled
from tests.training import tiny


@pytest.mark.parametrize("is_square", [False, True])
def test_values_are_within_an_eighth_and_right_on_average(is_square):
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32) * np.logspace(-6, 0, 3)[:, None]
    x = np.square(x) if is_square else x
    keys = jax.random.split(jax.random.key(0), 4000)
    stored = jax.jit(
        jax.vmap(lambda key: _restored(_scaled(jnp.asarray(x), key, is_square=is_square), is_square=is_square))
    )
    values = np.asarray(stored(keys), np.float64)
    large = np.abs(x) > 1e-2 * np.abs(x).max(axis=1, keepdims=True)
    assert np.abs(values / x - 1)[:, large].max() < (0.28 if is_square else 0.126)
    error = np.abs(values.mean(axis=0) / x - 1)[large]
    assert error.max() < (0.01 if is_square else 0.005)


@pytest.mark.full
def test_they_take_about_a_byte_and_train_as_those_of_float32():
    model, losses, sizes = tiny.llama(dim=64, mlp_dim=128, head_dim=32, rope=ops.Rope(32)), {}, {}
    batch = tiny.batch()
    for moments in (jnp.float32, jnp.float8_e4m3fn):
        optimizer = training.adamw(1e-2, moments=moments, mask=None)
        state = training.make_state(training.copy_model(model), optimizer)
        step = tiny.jit_step(training.make_train_step(tiny.loss, optimizer))
        sizes[moments] = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
        losses[moments] = []
        for _ in range(25):
            state, metrics = step(state, batch)
            losses[moments].append(float(metrics["loss"]))
    full, small = losses.values()
    assert max(full[-1], small[-1]) < 0.05 * full[0]
    assert np.abs(np.subtract(full, small)).max() < 0.05 * full[0]
    params = sum(x.nbytes for x in nn.partition(model)[0].values()) / 4
    assert sizes[jnp.float32] > 8 * params
    assert sizes[jnp.float8_e4m3fn] < 2.2 * params


def test_on_a_mesh_scales_are_split_like_their_values():
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2))
    optimizer = training.adamw(1e-2, moments=jnp.float8_e4m3fn, mask=None)
    build = lambda: tiny.llama(dim=64, mlp_dim=1024, head_dim=32, rope=ops.Rope(32))
    state = training.abstract_state(build, optimizer, layout=layout)  # that of make_state, as test_trainer_restore has
    nu = optax.tree.get(state.opt_state, "nu")["layers.groups.0.0.mlp.up.w"]
    param = state.trainable["layers.groups.0.0.mlp.up.w"]
    assert nu.codes.sharding == param.sharding and nu.codes.dtype == jnp.float8_e4m3fn
    assert not nu.scales.sharding.is_fully_replicated
