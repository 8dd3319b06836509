"""Every loss on a small model and one batch for all of them.

All losses are computed from one forward pass (`everything`), so that a program is compiled once for all of them; each
loss and each of its metrics is compared, and the gradient of a weighted sum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, sharding, training
from maxlib import post_training as pt
from maxlib.training._step import make_gradient
from tests.nn.tiny import filled_llama
from tests.training import tiny

ROWS, T, VOCAB, K = 8, 24, 64, 3
GPIPE, EARLY = (sharding.Pipeline(microbatches=4, schedule=schedule) for schedule in ("gpipe", "1f1b"))
PAIRS = {
    "sigmoid": pt.DPO(0.3, label_smoothing=0.1),
    "robust": pt.DPO(0.3, "robust", 0.1),
    "hinge": pt.DPO(0.3, "hinge"),
    "ipo": pt.DPO(0.3, "ipo"),
    "apo_zero": pt.DPO(0.3, "apo_zero"),
    "apo_down": pt.DPO(0.3, "apo_down"),
    "sppo": pt.DPO(0.3, "sppo_hard"),
    "nca": pt.DPO(0.3, "nca_pair"),
    "bco": pt.DPO(0.3, "bco_pair"),
    "sigmoid_norm": pt.DPO(0.3, "sigmoid_norm"),
    "exo": pt.DPO(0.3, "exo_pair", 0.1),
    "discopop": pt.DPO(0.3, "discopop"),
    "forward_kl": pt.DPO(0.3, divergence="forward_kl"),
    "js": pt.DPO(0.3, divergence="js_divergence"),
    "alpha": pt.DPO(0.3, divergence="alpha_divergence"),
    "ld": pt.DPO(0.3, ld_alpha=0.4),
    "wpo": pt.DPO(0.3, weighted=True),
    "simpo": pt.SimPO(),
    "mixture": pt.MixedPreference(((0.7, pt.DPO(0.2)), (0.3, pt.DPO(0.2, "bco_pair")))),
}
POLICIES = {
    "grpo": pt.GRPO(temperature=0.8, kl_term=pt.KL(0.1), entropy=0.01),
    "dr_grpo": pt.GRPO(temperature=0.8, mean=pt.FixedLengthMean(20)),
    "dapo": pt.DAPO(temperature=0.8, kl_term=pt.KL(0.1, "corrected")),
    "gspo": pt.GSPO(temperature=0.8),
    "gspo_token": pt.GSPO(temperature=0.8, ratio="sequence_token"),
    "cispo": pt.CISPO(temperature=0.8, kl_term=pt.KL(0.1, "k2")),
    "rloo": pt.RLOO(temperature=0.8),
    "sapo": pt.SAPO(temperature=0.8),
    "vespo": pt.VESPO(temperature=0.8),
    "luspo": pt.LUSPO(temperature=0.8),
    "dppo": pt.DPPO(temperature=0.8, surrogate=pt.ProbabilityClip(0.01, 0.01)),
    "off_policy": pt.GRPO(temperature=0.8, off_policy_limit=0.01),
    "rejected": pt.GRPO(temperature=0.8, correction=pt.RolloutCorrection(None, keep=(0.9, 1.1))),
    "tis": pt.GRPO(temperature=0.8, correction=pt.RolloutCorrection("token", None, 1.5)),
    "mis": pt.GRPO(temperature=0.8, correction=pt.RolloutCorrection("sequence", 0.5, 2.0, "zero")),
}
LOSSES = {
    **PAIRS,
    **POLICIES,
    "kto": pt.KTO(0.3, 1.2, 0.8),
    "apo_unpaired": pt.KTO(0.3, 1.2, 0.8, "apo_zero_unpaired"),
    "bco_unpaired": pt.KTO(0.3, 1.2, 0.8, "bco"),
    "top_k": pt.Distillation(beta=0.3, hard=0.2),
    "dft": training.DFT(),
}


# One of every kind of sum: pairs, sequences, tokens, ratios and weights of sequences, stored targets. `full` has all.
FEW = "sigmoid", "dapo", "mis", "kto", "top_k"
ALL = tuple(LOSSES)


@dataclasses.dataclass(frozen=True)
class Everything(training.Loss):
    """The sum of these losses with different factors; sums of each, and what each is divided by, are metrics."""

    names: tuple[str, ...] = FEW

    def from_hidden(self, model, hidden, batch):
        total, sums = 0.0, {}
        for i, name in enumerate(self.names):
            value, stats = LOSSES[name].from_hidden(model, hidden, batch)
            total += (1 + i % 4) * value
            sums |= {f"{name}/loss": value, f"{name}/count": stats.num_targets}
            sums |= {f"{name}/{metric}": x for metric, x in stats.sums.items()}
        return total, training.Stats(jnp.asarray(float(len(batch["tokens"]))), jax.lax.stop_gradient(sums))


full = functools.partial(pytest.param, marks=pytest.mark.full)
chosen = pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), full(ALL, id="all")])


@functools.cache
def built():
    return filled_llama(num_layers=4, vocab=VOCAB)


def model():
    return jax.tree.map(jnp.copy, built())


@functools.cache
def batch():
    """Rows of two pairs: segments 1 and 3 chosen, 2 and 4 rejected, each with a prompt; the last row has one pair."""
    rng = np.random.default_rng(0)
    segment_ids, targets = np.zeros((ROWS, T), np.int32), np.full((ROWS, T), -1, np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, T)).astype(np.int32)
    values = {name: np.zeros((ROWS, T), np.float32) for name in ("advantages", "desirable")}
    for row in range(ROWS):
        begin = 0
        for segment in range(1, 5 if row < ROWS - 1 else 3):
            size, prompt = int(rng.integers(4, 7)), int(rng.integers(1, 3))
            at = slice(begin, begin + size)
            segment_ids[row, at] = segment
            targets[row, begin + prompt - 1 : begin + size - 1] = tokens[row, begin + prompt : begin + size]
            values["advantages"][row, at], values["desirable"][row, at] = rng.normal(), rng.random() < 0.5
            begin += size
    near = lambda: (rng.normal(-4.1, 0.3, (ROWS, T))).astype(np.float32)
    log_p = np.log(rng.dirichlet(np.ones(K + 2), (ROWS, T))[..., :K]).astype(np.float32)
    ids = np.argsort(rng.random((ROWS, T, VOCAB)), axis=-1)[..., :K].astype(np.int32)
    scores = {name: near() for name in ("reference_log_probs", "old_log_probs", "sampler_log_probs")}
    stored = {"teacher_ids": ids, "teacher_log_probs": log_p, "kl_baseline": np.full(ROWS, 0.4, np.float32)}
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, **values, **scores, **stored}


def gradient(names):
    """The gradient of `Everything` as a step computes it in the active layout."""
    return make_gradient(Everything(names), dtype=jnp.float32)


def run(gradients, spread, data):
    compiled = jax.jit(gradients, compiler_options=tiny.QUICKLY)
    return jax.device_get(compiled(*nn.partition(spread), jax.tree.map(jnp.asarray, data), jax.random.key(0)))


@functools.cache
def alone(names):
    return run(tiny.by_autodiff(functools.partial(Everything(names), dtype=jnp.float32)), model(), batch())


def check(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    close_sums(got[2].sums, want[2].sums)
    close_gradients(got[0], want[0])


def close_sums(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=2e-5, err_msg=name)


def close_gradients(got, want):
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        np.testing.assert_allclose(got[path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


def separate(data):
    """Each segment in a row of its own, chosen rows before rejected ones."""
    parts = []
    for row in range(ROWS):
        for segment in range(1, data["segment_ids"][row].max() + 1):
            at = np.flatnonzero(data["segment_ids"][row] == segment)
            part = {}
            for name, x in data.items():
                part[name] = x[row]
                if x.ndim > 1:
                    part[name] = np.zeros((8, *x.shape[2:]), x.dtype)
                    part[name][: len(at)] = x[row, at]
            part["targets"][len(at) :] = -1
            part["segment_ids"] = (part["segment_ids"] > 0).astype(np.int32)
            parts.append(part)
    return [{name: np.stack([part[name] for part in half]) for name in parts[0]} for half in (parts[::2], parts[1::2])]


def halves(seed=0):
    """Pairs as two sub-batches with one segment each."""
    first, second = separate(batch())
    keep = ("tokens", "targets", "segment_ids")
    return {half: {k: x[k][:8] for k in keep} for half, x in (("chosen", first), ("rejected", second))}
