"""Skipped steps, averages, rates by path and frozen parameters, with the step that uses them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, training
from tests.training import tiny

PARAMS = {"w": jnp.ones(3)}


def run(optimizer, gradients, losses):
    """Parameters and what was skipped, step by step."""
    update = jax.jit(optimizer.update)
    params, state, seen = PARAMS, optimizer.init(PARAMS), []
    for gradient, loss in zip(gradients, losses, strict=True):
        updates, state = update({"w": jnp.full(3, gradient)}, state, params, value=jnp.float32(loss))
        params = optax.apply_updates(params, updates)
        seen.append(bool(state.skipped))
    return params, state, seen


@pytest.mark.parametrize(
    ("gradient", "loss"), [(9.0, 1.0), (1.0, 2.0), (np.nan, 1.0), (1.0, np.inf)], ids=["norm", "loss", "nan", "inf"]
)
def test_a_spike_leaves_no_trace(gradient, loss):
    make = lambda: training.skip_spikes(optax.adam(0.1), after=3)
    spiked = run(make(), [1.0, 1.1, 0.9, gradient, 1.0], [1.0, 0.9, 1.0, loss, 0.8])
    clean = run(make(), [1.0, 1.1, 0.9, 1.0], [1.0, 0.9, 1.0, 0.8])
    assert spiked[2] == [False, False, False, True, False]
    jax.tree.map(np.testing.assert_array_equal, spiked[:2], clean[:2])


def test_early_steps_are_skipped_only_when_they_are_not_finite():
    skipped = run(training.skip_spikes(optax.sgd(0.1), after=3), [1.0, 90.0, np.nan], [1.0, 9.0, 1.0])[2]
    assert skipped == [False, False, True]


def test_the_step_reports_what_it_skips_and_the_state_stays_good():
    def loss(model, batch, key):
        total, stats = training.next_token_loss(model, batch, key, dtype=jnp.float32)
        return total * batch["scale"][0], stats

    optimizer = training.skip_spikes(training.adamw(1e-2, mask=None))
    state = training.make_state(tiny.model(), optimizer)
    step = jax.jit(training.make_train_step(loss, optimizer))
    batch = tiny.batch() | {"scale": jnp.array([np.nan])}
    after, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    assert metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, after.trainable, state.trainable)
    assert step(after, batch | {"scale": jnp.array([1.0])})[1]["skipped"] == 0


def test_the_average_follows_the_parameters():
    optimizer = training.averaged(training.adamw(1e-2, mask=None), decay=0.9)
    state = training.make_state(tiny.model(), optimizer)
    want = jax.tree.map(np.asarray, state.trainable)
    step = jax.jit(training.make_train_step(training.next_token_loss, optimizer))
    for _ in range(3):
        state, _ = step(state, tiny.batch())
        want = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * np.asarray(p), want, state.trainable)
    got, _ = nn.partition(training.averaged_model(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), got, want)
    with pytest.raises(ValueError, match="keeps no average"):
        training.averaged_model(training.make_state(tiny.model(), training.adamw(1e-2, mask=None)))


def test_rates_by_path():
    params, _ = nn.partition(tiny.llama())
    optimizer = optax.chain(optax.sgd(1.0), training.scale_by_path({"layers.attn.q.*": 0.0, "layers.attn.*": 0.5}))
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    rate = {nn.logical_path(path): float(-u.mean()) for path, u in updates.items()}
    assert rate["layers.attn.q.w"] == 0
    assert rate["layers.attn.o.w"] == 0.5
    assert rate["layers.mlp.up.w"] == rate["embed.w"] == 1
    with pytest.raises(ValueError, match=r"\['atn'\] fit none.*embed\.w"):
        training.scale_by_path({"atn": 2.0}).init(params)


def test_what_is_frozen_stays_and_has_no_moments():
    model = tiny.llama()
    optimizer = training.adamw(1e-2, mask=None)
    state = training.make_state(model, optimizer, filter=training.only("layers.mlp.*", "norm.scale"))
    names = {nn.logical_path(path) for path in state.trainable}
    assert names == {"norm.scale", *(f"layers.mlp.{part}.w" for part in ("gate", "up", "down"))}
    assert optax.tree.get(state.opt_state, "mu").keys() == state.trainable.keys()
    with pytest.raises(ValueError, match="takes none of"):
        training.make_state(model, optimizer, filter=training.only("layers.mpl.*"))
