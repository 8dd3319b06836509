"""Losses, gradients and metrics equal TRL's on stored arrays (`make_golden.py`): within 5e-5."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, ops
from maxlib import post_training as pt
from maxlib.ops import LogProbs
from maxlib.post_training._reference import interleaved
from maxlib.post_training._segments import segment_sums
from maxlib.training._step import means
from tests.post_training.arrays import PAIRS, TEMPERATURE, V, arrays, targets
from tests.training import tiny

DATA = arrays()
TRL = np.load(Path(__file__).parent / "golden" / "trl.npz")
PREFERENCES = {
    "dpo/sigmoid": pt.DPO(0.3),
    "dpo/robust": pt.DPO(0.3, "robust", label_smoothing=0.2),
    "dpo/hinge": pt.DPO(0.3, "hinge"),
    "dpo/ipo": pt.DPO(0.3, "ipo"),
    "dpo/apo_zero": pt.DPO(0.3, "apo_zero"),
    "dpo/apo_down": pt.DPO(0.3, "apo_down"),
    "dpo/sppo_hard": pt.DPO(0.3, "sppo_hard"),
    "dpo/nca_pair": pt.DPO(0.3, "nca_pair"),
    "dpo/bco_pair": pt.DPO(0.3, "bco_pair"),
    "dpo/sigmoid_norm": pt.DPO(0.3, "sigmoid_norm"),
    "dpo/mixture": pt.MixedPreference(((0.8, pt.DPO(0.3)), (0.2, pt.DPO(0.3, "bco_pair")), (0.5, pt.ChosenNLL()))),
    "dpo/exo_pair": pt.DPO(0.3, "exo_pair", label_smoothing=0.1),
    "dpo/discopop": pt.DPO(0.3, "discopop"),
    "dpo/aot": pt.DPO(0.3, "aot", label_smoothing=0.1),
    "dpo/aot_unpaired": pt.DPO(0.3, "aot_unpaired"),
    "dpo/forward_kl": pt.DPO(0.003, divergence="forward_kl"),
    "dpo/js_divergence": pt.DPO(0.3, "ipo", divergence="js_divergence"),
    "dpo/alpha_divergence": pt.DPO(0.3, "hinge", divergence="alpha_divergence", alpha=0.4),
    "dpo/ld": pt.DPO(0.3, ld_alpha=0.4),
    "dpo/wpo": pt.DPO(0.3, weighted=True),
    "simpo": pt.SimPO(2.0, gamma=0.5, label_smoothing=0.1),
    "orpo": pt.ORPO(0.2),
    "cpo/sigmoid": pt.CPO(0.2, label_smoothing=0.1, nll_weight=0.5),
    "cpo/hinge": pt.CPO(0.2, "hinge", nll_weight=0.5),
    "cpo/ipo": pt.CPO(0.2, "ipo", nll_weight=0.5),
}
grpo = functools.partial(pt.GRPO, temperature=TEMPERATURE)
dapo = functools.partial(pt.DAPO, temperature=TEMPERATURE)
even = functools.partial(dapo, surrogate=pt.Clip(0.2, 0.2))
corrected = lambda by, outside: grpo(kl_term=pt.KL(0.2), correction=pt.RolloutCorrection(by, 0.5, 1.5, outside))
POLICIES = {
    "policy/grpo": grpo(),
    "policy/grpo on-policy": grpo(),
    "policy/two-sided": grpo(surrogate=pt.Clip(0.2, 0.28, delta=1.3)),
    "policy/dr_grpo": grpo(mean=pt.FixedLengthMean(11)),
    "policy/dapo": dapo(),
    "policy/gspo": pt.GSPO(temperature=TEMPERATURE, surrogate=pt.Clip(0.05, 0.08)),
    "policy/cispo": pt.CISPO(temperature=TEMPERATURE, surrogate=pt.TruncatedWeight(1.1)),
    "policy/k3": even(kl_term=pt.KL(0.3)),
    "policy/corrected": even(kl_term=pt.KL(0.3, "corrected")),
    "policy/entropy": even(entropy=0.1),
    "policy/rloo": pt.RLOO(temperature=TEMPERATURE),
    "policy/token_truncate": corrected("token", "clip"),
    "policy/token_mask": corrected("token", "zero"),
    "policy/sequence_truncate": corrected("sequence", "clip"),
    "policy/sequence_mask": corrected("sequence", "zero"),
    "tools/grpo": grpo(kl_term=pt.KL(0.3)),
    "tools/dapo": dapo(),
    "tools/gspo": pt.GSPO(temperature=TEMPERATURE, surrogate=pt.Clip(0.05, 0.08)),
    "tools/cispo": pt.CISPO(temperature=TEMPERATURE, surrogate=pt.TruncatedWeight(1.1)),
    "tools/sapo": pt.SAPO(temperature=TEMPERATURE),
    "tools/vespo": pt.VESPO(temperature=TEMPERATURE),
    "tools/luspo": pt.LUSPO(temperature=TEMPERATURE, surrogate=pt.Clip(0.05, 0.08)),
    "tools/off-policy": even(off_policy_limit=0.2),
    "tools/top entropy": even(top_entropy=0.4, kl_term=pt.KL(0.3)),
}
# Ours are means by the weights of the loss. Those of losses that average over tokens are TRL's.
METRICS = {
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
    "clip_ratio/region": "clip_ratio/region_mean",
}


class Head:
    """A head that takes hidden states for logits."""

    softcap = None

    def head_weight(self):
        return jnp.eye(V)


@pytest.fixture(autouse=True)
def _without_chunks(monkeypatch):
    """Formulas are what is tested here; eager operations on small arrays compile once for all cases."""

    def scored(hidden, weight, targets, *, temperature=1.0, softcap=None, entropy=False):
        log_p = jax.nn.log_softmax(hidden / temperature)
        chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        valid = targets >= 0
        spread = jnp.where(valid, -(jnp.exp(log_p) * log_p).sum(-1), 0) if entropy else None
        return LogProbs(jnp.where(valid, chosen, 0), valid, spread)

    monkeypatch.setattr(nn, "token_log_probs", scored)


def compare(name, loss_of, logits):
    value, gradient = jax.value_and_grad(loss_of)(jnp.asarray(logits))
    np.testing.assert_allclose(value, TRL[f"{name}:loss"], atol=5e-5, rtol=5e-5)
    np.testing.assert_allclose(gradient, TRL[f"{name}:gradient"], atol=5e-5)
    assert np.abs(gradient).max() > 1e-3


def mean(loss, batch, logits):
    total, stats = loss.from_hidden(Head(), logits, batch)
    return total / stats.num_targets, means(stats)


def rows(*names):
    out = {"tokens": DATA["ids"][:, :-1], "targets": targets(DATA), "segment_ids": DATA["attention"][:, :-1]}
    return {name: jnp.asarray(x) for name, x in (out | {name: DATA[name] for name in names}).items()}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name):
    loss = PREFERENCES[name]
    rows_of_both = rows("reference_log_probs") if loss.needs_reference else rows()
    batch = interleaved(
        {
            "chosen": {k: x[:PAIRS] for k, x in rows_of_both.items()},
            "rejected": {k: x[PAIRS:] for k, x in rows_of_both.items()},
        }
    )
    order = np.arange(2 * PAIRS).reshape(2, PAIRS).T.reshape(-1)  # pairs next to each other
    run = lambda logits: mean(loss, batch, logits[order])
    compare(name, lambda logits: run(logits)[0], DATA["logits"])
    metrics = run(jnp.asarray(DATA["logits"]))[1]
    stored = {key.partition("metric/")[2] for key in TRL.files if key.startswith(f"{name}:metric/")} - {"entropy"}
    assert stored >= {"rewards/chosen", "rewards/rejected"}
    for metric in stored:
        np.testing.assert_allclose(metrics[metric], TRL[f"{name}:metric/{metric}"], atol=5e-5, rtol=5e-5)


def test_kto():
    batch = rows("reference_log_probs", "desirable")
    z = segment_sums(
        jnp.where(batch["targets"] >= 0, scores(DATA["mismatched"]) - batch["reference_log_probs"], 0), None
    )
    batch["kl_baseline"] = jnp.full(len(batch["tokens"]), jnp.mean(z))
    run = lambda logits: mean(pt.KTO(0.4, 1.2, 0.7), batch, logits)
    compare("kto", lambda logits: run(logits)[0], DATA["logits"])
    metrics = run(jnp.asarray(DATA["logits"]))[1]
    np.testing.assert_allclose(metrics["kl"], TRL["kto:metric/kl"], rtol=5e-5)
    # As TRL, rewards are means over the answers of their kind, not over all of them.
    mask, good = batch["targets"] >= 0, DATA["desirable"]
    rewards = 0.4 * np.where(mask, scores(DATA["logits"]) - batch["reference_log_probs"], 0).sum(1)
    assert 0 < good.sum() < len(good)
    np.testing.assert_allclose(metrics["rewards/desirable"], rewards[good].mean(), rtol=5e-5)
    np.testing.assert_allclose(metrics["rewards/undesirable"], rewards[~good].mean(), rtol=5e-5)
    np.testing.assert_allclose(metrics["desirable"], good.mean(), rtol=1e-6)


def scores(logits):
    return np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), DATA["ids"][:, 1:, None], -1)[..., 0]


def policy_rows(name):
    batch = rows("advantages", "old_log_probs", "reference_log_probs", "sampler_log_probs")
    batch["targets"] = jnp.asarray(targets(DATA, tools=name.startswith("tools")))
    if "on-policy" in name:
        del batch["old_log_probs"]
    return batch


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name):
    loss, batch = POLICIES[name], policy_rows(name)
    run = lambda logits: mean(loss, batch, logits)
    compare(name, lambda logits: run(logits)[0], DATA["logits"])
    if loss.mean == "token":
        metrics = run(jnp.asarray(DATA["logits"]))[1]
        for ours, theirs in METRICS.items():
            if (key := f"{name}:metric/{theirs}") in TRL.files:
                np.testing.assert_allclose(metrics[ours], TRL[key], atol=5e-5, rtol=5e-5, err_msg=ours)


def test_policies_of_packed_rows():
    """Two sequences in each row."""
    two_in_a_row = lambda x: x.reshape(PAIRS, 2 * x.shape[1], *x.shape[2:])

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def all_gradients(logits):
        values = {}
        for name, loss in POLICIES.items():
            batch = policy_rows(name)
            batch["advantages"] = jnp.broadcast_to(batch["advantages"][:, None], batch["tokens"].shape)
            batch["segment_ids"] *= jnp.array([[1], [2]] * PAIRS)
            packed = {key: two_in_a_row(x) for key, x in batch.items()}
            run = lambda logits, loss=loss, packed=packed: mean(loss, packed, two_in_a_row(logits))[0]
            values[name] = jax.value_and_grad(run)(logits)
        return values

    for name, (value, gradient) in all_gradients(jnp.asarray(DATA["logits"])).items():
        np.testing.assert_allclose(value, TRL[f"{name}:loss"], atol=5e-5, rtol=5e-5, err_msg=name)
        np.testing.assert_allclose(gradient, TRL[f"{name}:gradient"], atol=5e-5, err_msg=name)


def test_the_distance_of_the_sampler_from_the_policy():
    batch = policy_rows("tools/dapo")
    metrics = mean(dapo(), batch, jnp.asarray(DATA["logits"]))[1]
    log_p = np.asarray(jax.nn.log_softmax(DATA["logits"] / TEMPERATURE))
    log_probs = np.take_along_axis(log_p, DATA["ids"][:, 1:, None], -1)[..., 0]
    gap = (log_probs - DATA["sampler_log_probs"])[targets(DATA, tools=True) >= 0]
    np.testing.assert_allclose(metrics["sampler_gap"], np.abs(gap).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["sampler_kl"], (np.exp(gap) - gap - 1).mean(), rtol=1e-5)


def test_unpaired_preferences_without_a_baseline():
    batch = rows("reference_log_probs", "desirable")
    run = lambda loss, logits: mean(loss, batch, jnp.asarray(logits))[0]
    apo = pt.KTO(0.4, 1.2, 0.7, "apo_zero_unpaired")
    compare("kto/apo_zero_unpaired", functools.partial(run, apo), DATA["logits"])
    mask, good = np.asarray(batch["targets"]) >= 0, DATA["desirable"]
    rewards = 0.4 * np.where(mask, scores(DATA["logits"]) - batch["reference_log_probs"], 0).sum(1)
    away = rewards - rewards.mean()
    want = np.where(good, 1.2 * np.logaddexp(0, -away), 0.7 * np.logaddexp(0, away)).mean()
    np.testing.assert_allclose(run(pt.KTO(0.4, 1.2, 0.7, "bco"), DATA["logits"]), want, rtol=1e-5)
    batch["kl_baseline"] = jnp.full(len(good), 0.5)
    away = rewards - 0.4 * 0.5
    want = np.where(good, 1.2 * np.logaddexp(0, -away), 0.7 * np.logaddexp(0, away)).mean()
    np.testing.assert_allclose(run(pt.KTO(0.4, 1.2, 0.7, "bco"), DATA["logits"]), want, rtol=1e-5)


def test_the_students_likeliest_tokens_and_features():
    batch = rows() | {"teacher": Head(), "teacher_hidden": jnp.asarray(DATA["teacher"])}
    run = lambda loss, logits: mean(loss, batch, logits)
    loss = pt.Distillation(beta=1.0, temperature=TEMPERATURE, student_top_k=3)
    compare("student_top_k/1.0", lambda logits: run(loss, logits)[0], DATA["logits"])
    mask = targets(DATA) >= 0
    want = ((DATA["logits"] - DATA["teacher"]) ** 2).mean(-1)[mask].mean()
    value, metrics = run(dataclasses.replace(loss, features=0.5), jnp.asarray(DATA["logits"]))
    np.testing.assert_allclose(metrics["features"], want, rtol=1e-5)
    np.testing.assert_allclose(value, metrics["divergence"] + 0.5 * want, rtol=1e-5)
    ids = jnp.zeros((*mask.shape, 2), jnp.int32)
    stored = rows() | {"teacher_ids": ids, "teacher_log_probs": jnp.zeros(ids.shape) - 1.0}
    with pytest.raises(ValueError, match="features need a teacher model"):
        mean(pt.Distillation(features=1.0), stored, jnp.asarray(DATA["logits"]))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences(beta):
    mask = targets(DATA) >= 0
    teacher = jax.nn.log_softmax(DATA["teacher"] / TEMPERATURE)
    student = lambda logits: jax.nn.log_softmax(logits / TEMPERATURE)
    average = lambda x: jnp.sum(jnp.where(mask, x, 0)) / mask.sum()
    run = lambda logits: average(ops.divergence(student(logits), teacher, beta=beta))
    compare(f"distillation/{beta}", run, DATA["logits"])
    values, ids = jax.lax.top_k(teacher, 3)
    chosen = lambda logits: jnp.take_along_axis(student(logits), ids, -1)
    run = lambda logits: average(ops.top_k_divergence(chosen(logits), values, beta=beta))
    compare(f"top_k/{beta}", run, DATA["logits"])
