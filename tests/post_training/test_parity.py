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
from maxlib.training._step import means
from tests.post_training.arrays import DATA, PAIRS, TEMPERATURE, V, pairs, rows, targets
from tests.training import tiny

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


@pytest.fixture(autouse=True, scope="module")
def _without_chunks():
    """Formulas are what is tested here."""

    def scored(hidden, weight, targets, *, temperature=1.0, softcap=None, entropy=False):
        log_p = jax.nn.log_softmax(hidden / temperature)
        chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        valid = targets >= 0
        spread = jnp.where(valid, -(jnp.exp(log_p) * log_p).sum(-1), 0) if entropy else None
        return LogProbs(jnp.where(valid, chosen, 0), valid, spread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn, "token_log_probs", scored)
        yield


def computed(losses):
    """Loss, metrics and gradient of functions of logits, compiled as one program."""
    gradients = {name: jax.value_and_grad(loss, has_aux=True) for name, loss in losses.items()}
    run = jax.jit(lambda logits: {name: f(logits) for name, f in gradients.items()}, compiler_options=tiny.QUICKLY)
    return jax.device_get(run(jnp.asarray(DATA["logits"])))


def compare(name, value, gradient):
    np.testing.assert_allclose(value, TRL[f"{name}:loss"], atol=5e-5, rtol=5e-5, err_msg=name)
    np.testing.assert_allclose(gradient, TRL[f"{name}:gradient"], atol=5e-5, err_msg=name)
    assert np.abs(gradient).max() > 1e-3


def mean(loss, batch, logits):
    total, stats = loss.from_hidden(Head(), logits, batch)
    return total / stats.num_targets, means(stats)


@pytest.fixture(scope="module")
def preferences():
    order = np.arange(2 * PAIRS).reshape(2, PAIRS).T.reshape(-1)  # pairs next to each other

    def of_pairs(loss, logits):
        return mean(loss, interleaved(pairs(*["reference_log_probs"] * loss.needs_reference)), logits[order])

    return computed({name: functools.partial(of_pairs, loss) for name, loss in PREFERENCES.items()})


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences(name, preferences):
    (value, metrics), gradient = preferences[name]
    compare(name, value, gradient)
    stored = {key.partition("metric/")[2] for key in TRL.files if key.startswith(f"{name}:metric/")} - {"entropy"}
    assert stored >= {"rewards/chosen", "rewards/rejected"}
    for metric in stored:
        np.testing.assert_allclose(metrics[metric], TRL[f"{name}:metric/{metric}"], atol=5e-5, rtol=5e-5)


def test_kto():
    batch = rows("reference_log_probs", "desirable")
    mask, good = np.asarray(batch["targets"]) >= 0, DATA["desirable"]
    reference = DATA["reference_log_probs"]
    z = np.where(mask, scores(DATA["mismatched"]) - reference, 0).sum(1)
    batch["kl_baseline"] = jnp.full(len(z), z.mean())
    (value, metrics), gradient = computed({"kto": functools.partial(mean, pt.KTO(0.4, 1.2, 0.7), batch)})["kto"]
    compare("kto", value, gradient)
    np.testing.assert_allclose(metrics["kl"], TRL["kto:metric/kl"], rtol=5e-5)
    # As TRL, rewards are means over the answers of their kind, not over all of them.
    rewards = 0.4 * np.where(mask, scores(DATA["logits"]) - reference, 0).sum(1)
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


def two_in_a_row(x):
    return x.reshape(PAIRS, 2 * x.shape[1], *x.shape[2:])


def policy(name, packed, logits):
    batch = policy_rows(name)
    if packed:
        batch["advantages"] = jnp.broadcast_to(batch["advantages"][:, None], batch["tokens"].shape)
        batch["segment_ids"] *= jnp.array([[1], [2]] * PAIRS)
        batch, logits = {key: two_in_a_row(x) for key, x in batch.items()}, two_in_a_row(logits)
    return mean(POLICIES[name], batch, logits)


# Those that sum over a sequence, which by default have two sequences in each row.
OF_SEQUENCES = {
    "policy/grpo", "policy/gspo", "policy/rloo", "policy/sequence_truncate", "policy/sequence_mask",
    "tools/gspo", "tools/vespo", "tools/luspo", "tools/off-policy",
}  # fmt: skip


@functools.cache
def policies(packed, default):
    names = [name for name in POLICIES if ((name in OF_SEQUENCES) == packed) == default]
    return computed({name: functools.partial(policy, name, packed) for name in names})


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        pytest.param(name, packed, marks=[pytest.mark.full] * ((name in OF_SEQUENCES) != packed))
        for packed in (False, True)
        for name in POLICIES
    ],
)
def test_policies(name, packed):
    (value, metrics), gradient = policies(packed, (name in OF_SEQUENCES) == packed)[name]
    compare(name, value, gradient)
    if POLICIES[name].mean == "token":
        for ours, theirs in METRICS.items():
            if (key := f"{name}:metric/{theirs}") in TRL.files:
                np.testing.assert_allclose(metrics[ours], TRL[key], atol=5e-5, rtol=5e-5, err_msg=ours)


def test_the_distance_of_the_sampler_from_the_policy():
    (_, metrics), _ = policies(False, True)["tools/dapo"]
    log_p = np.asarray(jax.nn.log_softmax(DATA["logits"] / TEMPERATURE))
    log_probs = np.take_along_axis(log_p, DATA["ids"][:, 1:, None], -1)[..., 0]
    gap = (log_probs - DATA["sampler_log_probs"])[targets(DATA, tools=True) >= 0]
    np.testing.assert_allclose(metrics["sampler_gap"], np.abs(gap).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["sampler_kl"], (np.exp(gap) - gap - 1).mean(), rtol=1e-5)


def test_unpaired_preferences_without_a_baseline():
    batch, good = rows("reference_log_probs", "desirable"), DATA["desirable"]
    with_baseline = batch | {"kl_baseline": jnp.full(len(good), 0.5)}
    apo, bco = (pt.KTO(0.4, 1.2, 0.7, kind) for kind in ("apo_zero_unpaired", "bco"))
    losses = {"apo": (apo, batch), "bco": (bco, batch), "bco with a baseline": (bco, with_baseline)}
    got = computed({name: functools.partial(mean, *loss) for name, loss in losses.items()})
    compare("kto/apo_zero_unpaired", got["apo"][0][0], got["apo"][1])
    mask = np.asarray(batch["targets"]) >= 0
    rewards = 0.4 * np.where(mask, scores(DATA["logits"]) - DATA["reference_log_probs"], 0).sum(1)
    for name, baseline in (("bco", rewards.mean()), ("bco with a baseline", 0.4 * 0.5)):
        away = rewards - baseline
        want = np.where(good, 1.2 * np.logaddexp(0, -away), 0.7 * np.logaddexp(0, away)).mean()
        np.testing.assert_allclose(got[name][0][0], want, rtol=1e-5)


def test_the_students_likeliest_tokens_and_features():
    batch = rows() | {"teacher": Head(), "teacher_hidden": jnp.asarray(DATA["teacher"])}
    plain = pt.Distillation(beta=1.0, temperature=TEMPERATURE, student_top_k=3)
    losses = {"plain": plain, "features": dataclasses.replace(plain, features=0.5)}
    got = computed({name: functools.partial(mean, loss, batch) for name, loss in losses.items()})
    compare("student_top_k/1.0", got["plain"][0][0], got["plain"][1])
    mask = targets(DATA) >= 0
    want = ((DATA["logits"] - DATA["teacher"]) ** 2).mean(-1)[mask].mean()
    value, metrics = got["features"][0]
    np.testing.assert_allclose(metrics["features"], want, rtol=1e-5)
    np.testing.assert_allclose(value, metrics["divergence"] + 0.5 * want, rtol=1e-5)
    ids = jnp.zeros((*mask.shape, 2), jnp.int32)
    stored = rows() | {"teacher_ids": ids, "teacher_log_probs": jnp.zeros(ids.shape) - 1.0}
    with pytest.raises(ValueError, match="features need a teacher model"):
        jax.eval_shape(functools.partial(mean, pt.Distillation(features=1.0), stored), DATA["logits"])


def test_divergences():
    betas = (0.0, 0.3, 1.0)
    mask = targets(DATA) >= 0
    log_p = lambda logits: jax.nn.log_softmax(logits / TEMPERATURE)
    average = lambda x: (jnp.sum(jnp.where(mask, x, 0)) / mask.sum(), {})

    def of_all(beta, logits):
        return average(ops.divergence(log_p(logits), log_p(DATA["teacher"]), beta=beta))

    def of_top_k(beta, logits):
        values, ids = jax.lax.top_k(log_p(DATA["teacher"]), 3)
        return average(ops.top_k_divergence(jnp.take_along_axis(log_p(logits), ids, -1), values, beta=beta))

    kinds = {"distillation": of_all, "top_k": of_top_k}
    losses = {f"{kind}/{beta}": functools.partial(f, beta) for kind, f in kinds.items() for beta in betas}
    for name, ((value, _), gradient) in computed(losses).items():
        compare(name, value, gradient)
