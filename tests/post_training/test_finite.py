"""Every loss at its poles: value and gradient are finite, and garbage in what is not learned reaches neither.

A `where`, `minimum` or `clip` hides a value, but not the gradient of the branch that it does not choose.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, training
from maxlib import post_training as pt
from maxlib.nn.matmul import LowRank, PlainMatmul
from maxlib.nn.router import Router, RouterZ, Routing, SequenceBalance, SwitchBalance
from maxlib.post_training import preferences
from tests.post_training.every_loss import LOSSES, full
from tests.training import tiny

EXTREME = {
    **LOSSES,
    "orpo": pt.ORPO(),
    "cpo": pt.CPO(),
    "aot": pt.DPO(0.3, "aot", 0.1),
    "aot_unpaired": pt.DPO(0.3, "aot_unpaired", 0.1),
    "uncertain": pt.GRPO(top_entropy=0.5),
    "chosen": pt.ChosenNLL(),
    "two-sided": pt.GRPO(surrogate=pt.Clip(delta=4.0)),
    "k3": pt.RLOO(kl_term=pt.KL(0.1, "k3"), entropy=0.1),
    "corrected": pt.RLOO(kl_term=pt.KL(0.1, "corrected")),
    "ppo": pt.PPO(surrogate=pt.Clip(0.2, 0.2, delta=3.0)),
    "unlimited": pt.RLOO(correction=pt.RolloutCorrection("sequence", None, None)),
}
OF_LOGITS = "top_k", "next_token", "smooth", "teacher", "reverse", "mixture", "renormalized"


class Head:
    """A head whose logits are its hidden states, or whose hidden states are log-probabilities (`scored`)."""

    softcap = None

    def __init__(self, vocab):
        self.vocab = vocab

    def head_weight(self):
        return jnp.eye(self.vocab)


def scored(hidden, weight, targets, *, entropy=False, **_):
    log_prob = jnp.where(targets >= 0, hidden[..., 0], 0)
    return ops.LogProbs(log_prob, log_prob > -0.5, -log_prob if entropy else None)


LOG_P = 0.0, -1e-8, -1.0, -1e3
GRID = np.array([*itertools.product(LOG_P, LOG_P, (-1e3, 0.0, 1e3), (-1.0, 0.0, 1.0))], np.float32)


def rows(dtype):
    """A row for each point of the grid: a chosen and a rejected answer of two learned tokens and one that is not."""
    chosen, rejected, shift, advantages = (jnp.asarray(x, dtype)[:, None] for x in GRID.T)
    learned = jnp.array([[True, True, False] * 2])
    log_p = jnp.concatenate([chosen.repeat(3, 1), rejected.repeat(3, 1)], axis=1)
    spoiled = lambda x: jnp.where(learned, x, -jnp.inf).astype(dtype)  # what stands where nothing is learned
    batch = {name: spoiled(log_p - shift) for name in ("reference_log_probs", "old_log_probs", "sampler_log_probs")}
    batch |= {"advantages": spoiled(advantages.repeat(6, 1)), "desirable": advantages.repeat(6, 1) > 0}
    batch |= {"kl_baseline": shift[:, 0], "segment_ids": jnp.array([[1] * 3 + [2] * 3]).repeat(len(GRID), 0)}
    ids = jnp.zeros(log_p.shape, jnp.int32)
    return spoiled(log_p)[..., None], batch | {"tokens": ids, "targets": jnp.where(learned, ids, -1)}


@pytest.mark.parametrize("dtype", [jnp.float32, full(jnp.bfloat16)])
def test_losses_of_log_probabilities_are_finite(dtype, monkeypatch):
    monkeypatch.setattr(nn, "token_log_probs", scored)
    hidden, batch = rows(dtype)
    names = [name for name in EXTREME if name not in OF_LOGITS]

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def all_gradients(hidden, batch):
        values = {}
        for name in names:
            loss = EXTREME[name]
            f = lambda h, loss=loss: loss.from_hidden(Head(1), h, batch)
            values[name] = jax.value_and_grad(f, has_aux=True)(hidden)
        return values

    for name, ((value, stats), gradient) in jax.device_get(all_gradients(hidden, batch)).items():
        at = np.unique(GRID[~np.isfinite(np.asarray(gradient, np.float32)).all((1, 2))], axis=0)
        assert not len(at), f"{name}: gradients at (log p chosen, log p rejected, log ratio, advantage) {at[:4]}"
        assert np.isfinite(jax.tree.leaves((value, stats))).all(), name
        assert np.any(gradient), name


def test_losses_of_logits_are_finite():
    """Logits that differ by 1000, hidden states that are no numbers where nothing is learned."""
    logits = jnp.array([[[1e3, 0, 0, -1e3], [0, 1e3, 0, 0], [1.0, 2, 3, 4], [jnp.nan] * 4]])
    targets, never = jnp.array([[0, 0, 1, -1]]), jnp.array([[False, False, False, True]])
    spoiled = lambda x: jnp.where(never[..., None], jnp.nan, x)
    top = jnp.array([[[0.0, -1e3], [-1e3, -1e3], [-1.0, -jnp.inf], [0, 0]]])
    batch = {
        "tokens": targets,
        "targets": targets,
        "teacher_ids": jnp.where(never[..., None], 9, jnp.array([[[0, 2]]])),
    }
    batch |= {"teacher_log_probs": spoiled(top)}
    teacher = batch | {"teacher": Head(4), "teacher_hidden": spoiled(logits[..., ::-1])}
    losses = {
        "top_k": (pt.Distillation(beta=0.3, hard=0.2), batch),
        "renormalized": (pt.Distillation(tail=False), batch),
        "next_token": (training.NextToken(), batch),
        "smooth": (training.NextToken(z_loss=1e-3, label_smoothing=0.1), batch),
        "dft": (training.DFT(), batch),
        "diffusion": (training.MaskedDiffusion(mask_token=0), batch | {"noise_weights": jnp.where(never, 0, 1e3)}),
        "teacher": (pt.Distillation(), teacher),
        "student_top_k": (pt.Distillation(beta=1.0, student_top_k=2), teacher),
        "reverse": (pt.Distillation(beta=1.0), teacher),
        "mixture": (pt.Distillation(beta=0.5), teacher),
    }

    cases = {name: (loss, Head(4), logits, data) for name, (loss, data) in losses.items()}
    for name, ((value, _), gradient) in computed(cases).items():
        assert np.isfinite(value) and np.isfinite(gradient).all(), name


def computed(cases):
    """Value, statistics and gradient of every (loss, model, hidden states, batch), compiled as one program."""

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def run(hidden):
        results = {}
        for name, (loss, model, _, batch) in cases.items():
            f = lambda h, loss=loss, model=model, batch=batch: loss.from_hidden(model, h, batch)
            results[name] = jax.value_and_grad(f, has_aux=True)(hidden[name])
        return results

    return jax.device_get(run({name: hidden for name, (_, _, hidden, _) in cases.items()}))


OF_SCORES = {
    "value": pt.ValueLoss(),
    "labels": pt.TokenClassification(),
    "reward": pt.BradleyTerry(center=0.01),
    "embedding": pt.InfoNCE(symmetric=True),
}


class Scores(Head):
    """A head whose scores are its hidden states."""

    def __init__(self, head=None):
        self.vocab, self.head = 2, head

    def logits(self, hidden):
        return hidden


def test_losses_of_scores_and_embeddings_are_finite():
    """Scores of 1000 and texts of zero vectors, with garbage where nothing is learned."""
    nothing = jnp.array([[False, False, True], [False, False, True]])
    spoiled = lambda x: jnp.where(nothing, jnp.nan, x)
    hidden = jnp.array([[[1e3, -1e3], [0.0, 0.0], [0, 0]], [[0.0, 0.0], [-1e3, 1e3], [0, 0]]])
    of_tokens = {
        "targets": jnp.where(nothing, -1, jnp.array([[0, 1, 0], [1, 1, 0]])),
        "returns": spoiled(jnp.full((2, 3), -1e3)),
        "old_values": spoiled(jnp.zeros((2, 3))),
    }
    of_texts = {"interleaved": jnp.zeros((2, 2)), "segment_ids": jnp.where(nothing, 0, 1)}

    unlearned, embed = jnp.where(nothing[..., None], jnp.nan, hidden), Scores(nn.EmbeddingHead(2, rngs=nnx.Rngs(0)))
    inputs = {
        "value": (Scores(), unlearned, of_tokens),
        "labels": (Scores(), unlearned, of_tokens),
        "reward": (Scores(), hidden, of_tokens | of_texts),
        "embedding": (embed, jnp.zeros_like(hidden), of_texts),
    }
    for name, results in computed({name: (OF_SCORES[name], *inputs[name]) for name in OF_SCORES}).items():
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(results)), name


def test_no_loss_is_forgotten():
    """A new loss must join those above; `nn.cross_entropy` is that of MTP's modules."""
    exported = [getattr(room, name) for room in (training, pt) for name in dir(room)]
    losses = {loss for loss in exported if isinstance(loss, type) and issubclass(loss, training.Loss)}
    bases = {training.Loss, training.MTP, pt.ReferencedLoss, pt.PreferenceLoss, pt.PolicyLoss}
    others = {training.NextToken, training.MaskedDiffusion, training.BySource, *map(type, OF_SCORES.values())}
    assert losses - bases == {type(loss) for loss in EXTREME.values()} | others
    assert {loss.loss_type for loss in EXTREME.values() if isinstance(loss, pt.DPO)} == set(preferences._LOSSES)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_divergences_of_impossible_tokens_are_finite(dtype):
    """Tokens that neither of two distributions has; a bucket of all others without any mass."""
    p, q = (jnp.log(jnp.array(x, dtype)) for x in ([0.5, 0.5, 0.0, 0.0], [0.25, 0.0, 0.0, 0.75]))
    want = 0.5 * np.log(0.5 / 0.375) + 0.5 * np.log(0.5 / 0.25)
    want = 0.5 * want + 0.5 * (0.25 * np.log(0.25 / 0.375) + 0.75 * np.log(0.75 / 0.375))
    value, gradients = jax.jit(jax.value_and_grad(functools.partial(ops.divergence, beta=0.5), (0, 1)))(q, p)
    np.testing.assert_allclose(value, want, rtol=1e-6 if dtype == jnp.float32 else 0.02)
    assert np.isfinite(gradients).all()

    @jax.jit
    def closed(x):
        of = lambda x, tail: ops.top_k_divergence(x, jnp.log(jnp.array([0.7, 0.2], dtype)), tail=tail)
        return [jax.grad(of)(x, tail) for tail in (True, False)]

    for at in ([0.0, -1e3], [-1e3, -1e3]):
        assert np.isfinite(closed(jnp.array(at, dtype))).all()


def test_routers_and_their_losses_are_finite():
    """Sigmoid scores may all be 0; padding may have logits of -inf."""
    valid, x = jnp.array([[True, True, False]]), jnp.array([[[1.0, 0], [0, 1], [1, 1]]])
    losses, ctx = (SwitchBalance(1.0), SequenceBalance(1.0), RouterZ(1.0)), nn.make_context(1, 3, valid=valid)

    def total(x):
        router = Router(2, 4, top_k=2, score=jax.nn.sigmoid, rngs=nnx.Rngs(0))
        router.gate.w.set_value(jnp.array([[-1e3, 0], [-1e3, 0], [-1e3, 1], [-1e3, -1]]))
        routing = router(x)
        return sum(loss(routing, ctx) for loss in losses) + jnp.sum(routing.weights)

    value, gradient = jax.jit(jax.value_and_grad(total))(x)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    logits = jnp.array([[[1.0, 2], [3, 4], [-jnp.inf, -jnp.inf]]])
    of_logits = lambda z: RouterZ(1.0)(Routing(jnp.zeros((1, 3, 1), int), jnp.ones((1, 3, 1)), z, z), ctx)
    value, gradient = jax.jit(jax.value_and_grad(of_logits))(logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(value, np.mean(np.log(np.exp([1, 3]) + np.exp([2, 4])) ** 2), rtol=1e-6)


def test_what_was_finite_is_unchanged():
    """ORPO, ratios and divergences against their formulas in float64, up to where these are huge."""
    x = np.array([-1e-8, -1e-7, -1e-3, -0.5, -1.0, -20.0, -1e3])
    chosen, rejected = (y.ravel() for y in np.meshgrid(x, x))
    odds = lambda x: x - np.log(-np.expm1(x))
    want = 0.1 * np.logaddexp(0, odds(rejected) - odds(chosen))
    ones = jnp.ones(len(chosen))
    got = pt.ORPO(0.1).of_pairs(
        preferences.Answers(jnp.asarray(chosen, jnp.float32), jnp.asarray(rejected, jnp.float32), ones, ones)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    d = np.array([[-1e3, -30.0, -1.0, 0.0, 1.0, 39.0]])
    old, mask = jnp.asarray(-d, jnp.float32), jnp.ones(d.shape, bool)
    np.testing.assert_allclose(pt.policies.policy_ratio(0 * old, old, mask, None), np.exp(d), rtol=1e-5)
    np.testing.assert_allclose(pt.KL(kind="k3")(0 * old, -old), np.exp(d) - d - 1, rtol=1e-5, atol=1e-6)


def test_an_outlier_weighs_nothing_if_its_advantage_is_zero():
    """Over 400 tokens a ratio of 1.35 at each is e^120 for the sequence, more than float32 has."""
    old, mask = jnp.full((1, 400), -0.3), jnp.ones((1, 400), bool)
    clips = pt.Clip(), pt.Clip(delta=4.0), pt.TruncatedWeight()

    def loss(log_prob, zero, by, clip):
        ratio = pt.policies.policy_ratio(log_prob, old, mask, None, by=by)
        return jnp.sum(clip(ratio, zero, log_prob).loss)

    @jax.jit
    def gradients(zero):
        cases = itertools.product(("token", "sequence_sum"), clips)
        return [jax.value_and_grad(loss)(zero, zero, by, clip) for by, clip in cases]

    for value, gradient in jax.device_get(gradients(jnp.zeros((1, 400)))):
        assert value == 0 and not gradient.any()


def test_a_row_of_zeros_has_no_direction_for_dora():
    """Its norm is 0, and so is the magnitude that an adapter starts with."""
    w, x = nnx.Param(jnp.array([[1.0, 2.0], [0.0, 0.0]])), jnp.array([[3.0, 4.0]])
    a, b, magnitude = nnx.Param(jnp.ones((1, 2))), nnx.Param(jnp.zeros((2, 1))), nnx.Param(jnp.array([5**0.5, 0.0]))
    matmul = LowRank(PlainMatmul(), a, b, scale=1.0, summed=(-1,), kept=(-2,), magnitude=magnitude)

    def run(x):
        y = matmul.einsum("td,fd->tf", x, w)
        return y.sum(), y

    (_, y), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(x)
    np.testing.assert_allclose(y, [[11.0, 0.0]], rtol=1e-6)
    assert np.isfinite(gradient).all()
