"""Ten AdamW steps of an adapter: losses, gradients and factors equal those of TRL and PEFT (`make_steps.py`)."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib import adapters, nn, training
from maxlib import post_training as pt
from tests.models import parity
from tests.post_training import make_steps
from tests.post_training.arrays import TEMPERATURE, pairs, rows

LOSSES = {
    "sft": (training.NextToken(), rows),
    "dpo": (pt.DPO(0.3), functools.partial(pairs, "reference_log_probs")),
    "dapo": (
        pt.DAPO(temperature=TEMPERATURE, surrogate=pt.Clip(0.2, 0.2), kl_term=pt.KL(0.3)),
        functools.partial(rows, "advantages", "reference_log_probs"),
    ),
}


def projections(factors, rest, path):
    """By PEFT's names: norm and projection of each factor."""
    adapters.save(nn.combine(factors, rest), path)
    return {name: parity.projection(name, x) for name, x in load_file(path / "adapter_model.safetensors").items()}


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_ten_steps_are_those_of_trl_and_peft(name, tmp_path):
    stored = np.load(make_steps.PATH)
    model = maxlib.from_pretrained(make_steps.base(tmp_path / "base"), dtype=jnp.float32)
    start = make_steps.adapter(tmp_path / "start", **json.loads(str(stored["text"])))
    loss, batch = LOSSES[name]
    loss, batch = functools.partial(loss, dtype=jnp.float32), batch()
    optimizer = optax.adamw(make_steps.RATE, weight_decay=make_steps.DECAY)
    state = training.make_state(adapters.load(model, start), optimizer, filter=adapters.trainable)

    @jax.jit
    def step(state):
        def mean(factors):
            total, stats = loss(nn.combine(factors, state.rest), batch, jax.random.key(0))
            return total / stats.num_targets

        return *jax.value_and_grad(mean)(state.trainable), *training.make_train_step(loss, optimizer)(state, batch)

    losses = []
    for i in range(make_steps.STEPS):
        value, gradients, state, metrics = step(state)
        losses.append((float(metrics["loss"]), float(optax.tree.norm(gradients))))
        assert float(value) == pytest.approx(losses[-1][0], abs=1e-6)
        if i == 0:
            first = projections(gradients, state.rest, tmp_path / "gradients")
    want = stored[f"{name}:steps"]
    np.testing.assert_allclose(losses[0], want[0], rtol=5e-5)
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    assert abs(want[-1, 0] - want[0, 0]) > 0.02  # something was learned
    last = projections(state.trainable, state.rest, tmp_path / "last")
    for kind, ours in (("gradient", first), ("factor", last)):
        for key, value in ours.items():
            norm = stored[f"{name}:{kind}:{key}"][0]
            np.testing.assert_allclose(value, stored[f"{name}:{kind}:{key}"], rtol=1e-3, atol=1e-3 * norm, err_msg=key)
    assert first.keys() == {key.split(":")[2] for key in stored.files if key.startswith(f"{name}:gradient:")}


def test_dft_is_its_formula_and_its_factor_has_no_gradient():
    rng = np.random.default_rng(0)
    hidden, weight = rng.normal(size=(2, 5, 4)), rng.normal(size=(7, 4))
    ids = np.where(rng.random((2, 5)) < 0.3, -1, rng.integers(0, 7, (2, 5)))
    log_p = lambda w: jax.nn.log_softmax(jnp.asarray(hidden, jnp.float32) @ w.T)
    at = np.maximum(ids, 0)[..., None]
    log_prob_of = lambda w: jnp.where(ids >= 0, jnp.take_along_axis(log_p(w), at, -1)[..., 0], 0)
    log_probs = np.asarray(jax.jit(log_prob_of)(jnp.asarray(weight, jnp.float32)), np.float64)
    probability = np.exp(log_probs)

    class Head:
        softcap = None

        def __init__(self, w):
            self.w = w

        def head_weight(self):
            return self.w

    @jax.jit
    def gradients(w):
        batch = {"targets": jnp.asarray(ids)}
        of_loss = lambda w: training.DFT().from_hidden(Head(w), jnp.asarray(hidden, jnp.float32), batch)
        of_formula = lambda w: -jnp.sum(probability * log_prob_of(w))
        return jax.value_and_grad(of_loss, has_aux=True)(w), jax.value_and_grad(of_formula)(w)

    ((value, stats), gradient), (want, slope) = gradients(jnp.asarray(weight, jnp.float32))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)
    assert int(stats.num_targets) == (ids >= 0).sum()
    of_targets = rng.random((2, 5)).astype(np.float32)  # a weighted mean, as that of NextToken
    batch = {"targets": jnp.asarray(ids), "loss_weights": jnp.asarray(of_targets)}
    run = jax.jit(lambda w: training.DFT().from_hidden(Head(w), jnp.asarray(hidden, jnp.float32), batch))
    loss, stats = run(jnp.asarray(weight, jnp.float32))
    np.testing.assert_allclose(loss, -np.sum(of_targets * probability * log_probs), rtol=1e-5)
    np.testing.assert_allclose(stats.num_targets, of_targets[ids >= 0].sum(), rtol=1e-6)
    assert float(stats.sums["nll"].count) == (ids >= 0).sum()
