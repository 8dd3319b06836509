"""Advantages against formulas, and gradients of policy losses by enumeration."""

import contextlib
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import inference, nn, sharding
from maxlib import post_training as pt
from maxlib.training import losses
from maxlib.training._step import make_gradient
from tests.nn.tiny import filled_llama

NAN = float("nan")
REWARDS = np.array([[1.0, 0.0, 0.5, 0.0], [2.0, 2.0, 2.0, 2.0], [1.0, NAN, 0.0, 3.0]])


def test_group_advantages():
    got = pt.group_advantages(REWARDS)
    first, third = REWARDS[0], REWARDS[2, [0, 2, 3]]
    np.testing.assert_allclose(got[0], (first - first.mean()) / (first.std(ddof=1) + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(got[2, [0, 2, 3]], (third - third.mean()) / (third.std(ddof=1) + 1e-4), rtol=1e-6)
    assert (got[1] == 0).all() and got[2, 1] == 0
    plain = pt.group_advantages(REWARDS, scale=None)
    np.testing.assert_allclose(plain[0], first - first.mean(), rtol=1e-6)
    by_batch = pt.group_advantages(REWARDS, scale="batch")
    np.testing.assert_allclose(by_batch, plain / (np.nanstd(REWARDS, ddof=1) + 1e-4), rtol=1e-6)


def test_advantages_over_the_mean():
    got = pt.group_advantages(REWARDS, scale="mean")
    np.testing.assert_allclose(got[0], (REWARDS[0] - 0.375) / (0.375 + 1e-4), rtol=1e-6)
    assert got[2, 1] == 0 and (pt.group_advantages([[0.0, 0.0], [1.0, 0.0]], scale="mean")[0] == 0).all()
    with pytest.raises(ValueError, match="rewards of at least 0"):
        pt.group_advantages([[-1.0, 2.0]], scale="mean")


def test_the_factor_of_the_entropy_follows_a_target():
    """Only batches at or below the target get the bonus."""
    entropy = pt.AdaptiveEntropy(0.008, target=0.2, delta=0.005, high=0.015)
    batch = lambda h: {"targets": np.array([[1, 2, -1], [3, -1, -1]]), "sampler_log_probs": np.array([[-h] * 3] * 2)}
    factors = [entropy(batch(h)).tolist() for h in (0.1, 0.19, 0.1, 0.3, 0.3, 0.3, 0.3)]
    want = [0.013, 0.015, 0.015, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(factors, [[x, x] for x in want], rtol=1e-6)
    assert entropy.factor == 0
    entropy.factor = 0.01
    assert entropy(batch(NAN)).tolist() == [0, 0] and entropy.factor == 0.01  # nothing is known of the entropy
    one = batch(0.1)
    one["sampler_log_probs"][0, 0] = NAN
    np.testing.assert_allclose(entropy(one), 0.015)


def test_leave_one_out():
    got = pt.leave_one_out(REWARDS)
    np.testing.assert_allclose(got[0], [1 - 0.5 / 3, -0.5, 0.5 - 1 / 3, -0.5], rtol=1e-6)
    np.testing.assert_allclose(got[2], [1 - 1.5, 0, -2, 3 - 0.5], rtol=1e-6)
    assert pt.leave_one_out([[1.0, NAN], [0.0, 1.0]])[0].tolist() == [0, 0]  # scored alone: nothing to compare with
    scored = ~np.isnan(REWARDS)
    want = (got[scored] - got[scored].mean()) / (got[scored].std(ddof=1) + 1e-4)
    np.testing.assert_allclose(pt.leave_one_out(REWARDS, normalize=True)[scored], want, rtol=1e-5)


def test_several_rewards():
    both = np.stack([REWARDS, 10 * np.roll(REWARDS, 1, axis=1)], axis=-1)
    total = pt.advantages.combine_rewards(both, [1.0, 0.5])
    np.testing.assert_allclose(total[0], REWARDS[0] + 5 * np.roll(REWARDS[0], 1))
    assert total[2, 1] == 5.0 and total[2, 2] == 0.0  # one of the two was not scored
    assert np.isnan(pt.advantages.combine_rewards(np.full((1, 2, 2), NAN))).all()
    each = [
        (r - np.nanmean(r, 1, keepdims=True)) / (np.nanstd(r, 1, ddof=1, keepdims=True) + 1e-4)
        for r in (both[..., 0], both[..., 1])
    ]
    summed = np.nansum(np.stack(each), axis=0)
    want = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(pt.advantages.decoupled_advantages(both), want, rtol=1e-5, atol=1e-6)
    with warnings.catch_warnings():  # the sums are equal, the advantages are not
        warnings.simplefilter("error")
        assert (pt.advantages.decoupled_advantages([[[1, 0], [0, 2], [1, 0]]], [1.0, 0.5])[0] != 0).all()
    with pytest.raises(ValueError, match="a weight for each of the 2 rewards"):
        pt.advantages.combine_rewards(both, [1.0])


def test_rewards_that_teach_nothing():
    with pytest.raises(ValueError, match="G > 1 completions of each of N prompts"):
        pt.group_advantages(np.ones((4, 1)))
    with pytest.raises(ValueError, match="rewards must be finite"):
        pt.leave_one_out([[1.0, float("inf")]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert (pt.group_advantages(np.ones((2, 3))) == 0).all()
    assert len(caught) == 1 and "nothing is learned" in str(caught[0].message)
    metrics = pt.reward_metrics(REWARDS)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3) and metrics["unscored"] == 1
    assert metrics["reward"] == pytest.approx(np.nanmean(REWARDS))
    assert metrics["reward_std"] == pytest.approx(np.nanstd(REWARDS, ddof=1))
    assert pt.advantages.has_spread(REWARDS).tolist() == [True, False, True]


def test_penalties():
    np.testing.assert_allclose(
        pt.advantages.overlong_penalty([6, 8, 9, 10, 12], longest=10, buffer=2), [0, 0, 0.5, 1, 1]
    )
    with pytest.raises(ValueError, match="buffer must be a positive number"):
        pt.advantages.overlong_penalty([10], longest=10, buffer=0)  # 0 / 0
    got = pt.advantages.kl_penalized(
        [1.0, 0.0], [[-1.0, -2.0], [-1.0, 9.0]], [[-2.0, -2.5], [-1.5, 0.0]], [[1, 1], [1, 0]], beta=0.1
    )
    np.testing.assert_allclose(got, [1 - 0.15, -0.05])


WARM = pt.GRPO(temperature=0.7)


def test_a_sampler_that_draws_otherwise_is_refused():
    pt.GRPO().check_sampler(inference.Sampler())
    WARM.check_sampler(inference.Sampler(temperature=0.7))
    with pytest.raises(ValueError, match="temperature 0.7, the sampler draws them at 1.0"):
        WARM.check_sampler(inference.Sampler())
    with pytest.raises(ValueError, match="greedy sampler"):
        pt.GRPO(temperature=0.0).check_sampler(inference.Sampler(temperature=0.0))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        losses.score(None, jnp.zeros((1, 1, 1)), None, temperature=0.0)
    changes = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    changes |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert changes.keys() | {"temperature"} == {field.name for field in dataclasses.fields(inference.Sampler)}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"changes it by {{'{name}': {value}}}"):
            pt.GRPO().check_sampler(inference.Sampler(**{name: value}))


def rollouts(sampler):
    drawn = [inference.Completion([1, 2, 3], [-1.0] * 3, "length", inference.Sampler())] * 8
    return pt.completion_batch([[4, 5]] * 8, drawn, [[1.0, -1.0]] * 4, length=6) | {"sampler": sampler}


@pytest.mark.parametrize(
    "options",
    [pytest.param({"microbatches": 4, "neftune_alpha": 5.0}, marks=pytest.mark.full), {}],
    ids=["microbatches", "1f1b"],
)
def test_the_loss_compares_itself_with_the_sampler_of_a_batch(options):
    """Rollouts bring their sampler, so nobody has to ask."""
    pipeline = sharding.Pipeline(microbatches=2, schedule="1f1b")
    layout = sharding.Layout(sharding.make_mesh(stage=2, data=4), sharding.DP | pipeline)
    with contextlib.nullcontext() if options else sharding.use(layout):
        params, rest = nn.partition(filled_llama(num_layers=2, vocab=16))
        gradient = make_gradient(WARM, **options)
        trace = lambda batch: jax.eval_shape(gradient, params, rest, batch, jax.random.key(0))
        assert trace(rollouts(inference.Sampler(temperature=0.7)))[1].shape == ()
        with pytest.raises(ValueError, match="at temperature 0.7, the sampler draws them at 1.0"):
            trace(rollouts(inference.Sampler()))


def test_what_is_no_sampler_for_training_is_refused_in_a_batch():
    scored = lambda sampler: jax.eval_shape(
        lambda model, batch: WARM(model, batch, None), filled_llama(num_layers=1, vocab=16), rollouts(sampler)
    )
    with pytest.raises(ValueError, match="changes it by {'top_p': 0.9}"):
        scored(inference.Sampler(temperature=0.7, top_p=0.9))
    with pytest.raises(TypeError, match="is the inference.Sampler that drew"):  # the name of log-probabilities before
        scored(np.zeros((8, 6), np.float32))


# A bandit: one token out of five, enumerated.
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=5), jnp.float32)
ARMS = jnp.array([0.3, -1.0, 2.0, 0.5, 0.0])


def expected(loss):
    """The gradient that samples have on average: each arm's gradient times its probability."""
    probability = jax.nn.softmax(LOGITS)

    def total(logits):
        log_prob = jax.nn.log_softmax(logits)[:, None]  # arms as rows of one token
        return jnp.sum(probability[:, None] * loss(log_prob))

    return np.asarray(jax.grad(total)(LOGITS))


def of(value):
    return np.asarray(jax.grad(value)(LOGITS))


def test_the_policy_gradient_is_that_of_the_expected_reward():
    mask = jnp.ones((5, 1), bool)
    advantages = (ARMS - jnp.sum(jax.nn.softmax(LOGITS) * ARMS))[:, None]
    want = of(lambda z: -jnp.sum(jax.nn.softmax(z) * ARMS))
    clipped = lambda log_p, by: (
        pt.Clip()(pt.policies.policy_ratio(log_p, None, mask, None, by=by), advantages, log_p).loss
    )
    for by in ("token", "sequence", "sequence_token", "sequence_sum"):
        np.testing.assert_allclose(expected(functools.partial(clipped, by=by)), want, atol=1e-6)
    got = expected(lambda log_p: pt.TruncatedWeight()(jnp.ones((5, 1)), advantages, log_p).loss)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_which_divergence_each_estimator_has_the_gradient_of():
    reference = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(1).normal(size=5), jnp.float32))
    reverse = of(lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - reference)))
    forward = of(lambda z: jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(z))))
    got = lambda kind: expected(lambda log_p: pt.KL(kind=kind)(log_p, reference[:, None]))
    np.testing.assert_allclose(got("k2"), reverse, atol=1e-6)
    np.testing.assert_allclose(got("k3"), forward, atol=1e-6)
    np.testing.assert_allclose(got("corrected"), reverse, atol=1e-6)
    plain = expected(lambda log_p: log_p - reference[:, None])  # k1
    np.testing.assert_allclose(plain, 0, atol=1e-6)


def test_only_the_mean_over_sequences_prefers_a_length():
    """A short and a long wrong answer: the weight of all tokens of each, by mean."""
    mask = jnp.arange(32)[None, :] < jnp.array([4, 32])[:, None]
    weights = {by: pt.policies.mean_weights(mask, None, by=by) for by in ("sequence", "token", pt.FixedLengthMean(32))}
    per_token = {by: np.asarray(w)[:, 0] / float(count) for by, (w, count) in weights.items()}
    assert per_token["token"][0] == per_token["token"][1]
    assert per_token[pt.FixedLengthMean(32)][0] == per_token[pt.FixedLengthMean(32)][1]
    assert per_token["sequence"][0] == 8 * per_token["sequence"][1]
    for w, count in (weights["sequence"], weights["token"]):
        assert np.sum(w) == pytest.approx(float(count))


def test_probabilities_that_the_sampler_did_not_report_weigh_one():
    mask = jnp.ones((1, 3), bool)
    trained, sampler = jnp.array([[-1.0, -1.0, -3.0]]), jnp.array([[jnp.nan, -2.0, -1.0]])
    np.testing.assert_allclose(
        pt.RolloutCorrection("token", None, 2.0)(trained, sampler, mask, None), [[1, 2, np.exp(-2)]]
    )
    masked = pt.RolloutCorrection("token", 0.5, 2.0, "zero")(trained, sampler, mask, None)
    np.testing.assert_allclose(masked, [[1, 0, 0]])
    of_sequences = pt.RolloutCorrection("sequence", None, None)(trained, sampler, mask, jnp.array([[1, 1, 2]]))
    np.testing.assert_allclose(of_sequences, [[np.e, np.e, np.exp(-2)]], rtol=1e-6)


def test_tokens_whose_probability_moved_far_are_left_out():
    """DPPO's mask, against its formula in float64: p - μ at most 0.2 with the advantage, never against it."""
    rng = np.random.default_rng(0)
    (log_p, log_mu), advantages = np.log(rng.uniform(0.05, 0.95, (2, 4, 25))), rng.normal(size=(4, 25))
    moved, ratio = np.exp(log_p) - np.exp(log_mu), np.exp(log_p - log_mu)
    low, high = (moved < -0.2) & (advantages < 0), (moved > 0.2) & (advantages > 0)
    want = np.where(low | high, 0, -ratio * advantages) + 1e-3 * (log_p - log_mu) ** 2
    arrays = (jnp.asarray(x, jnp.float32) for x in (ratio, advantages, log_p))
    got = pt.ProbabilityClip()(*arrays)
    np.testing.assert_allclose(got.loss, want, rtol=2e-5)
    assert (got.low == low).all() and (got.high == high).all() and low.any() and high.any()


def test_sequences_whose_mean_ratio_is_far_are_rejected():
    """verl's geometric mean, alone and with weights of tokens."""
    trained, sampler = jnp.array([[-1.0, -1.0, -3.0, -1.0]]), jnp.array([[-1.5, -0.5, -1.0, -1.0]])
    mask, segment_ids = jnp.ones((1, 4), bool), jnp.array([[1, 1, 2, 2]])  # means of 1 and of e^-1
    alone = pt.RolloutCorrection(None, keep=(0.5, 1.5))(trained, sampler, mask, segment_ids)
    np.testing.assert_allclose(alone, [[1, 1, 0, 0]])
    both = pt.RolloutCorrection("token", high=1.2, keep=(0.5, 1.5))(trained, sampler, mask, segment_ids)
    np.testing.assert_allclose(both, [[1.2, np.exp(-0.5), 0, 0]], rtol=1e-6)


def test_settings_out_of_range():
    for wrong, message in (
        (lambda: pt.KTO(0.0), "beta must be positive"),
        (lambda: pt.GRPO(top_entropy=20), "a share of the tokens"),  # and no percentage
        (lambda: pt.VESPO(top_entropy=0), "a share of the tokens"),
        (lambda: pt.RolloutCorrection("token", 5.0, 2.0), "must not exceed the largest"),
        (lambda: pt.RolloutCorrection(None, keep=(1.001, 0.999)), "must not exceed the largest"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(ValueError, match="beta must be positive"):
        pt.DPO(0.0)
    with pytest.raises(ValueError, match=r"in \[0, 0.5\)"):
        pt.DPO(0.1, "robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match="loss_type must be one of sigmoid, robust, hinge, ipo"):
        pt.DPO(0.1, "IPO")
    with pytest.raises(ValueError, match="label_smoothing is for sigmoid, robust, exo_pair"):
        pt.DPO(0.1, "hinge", label_smoothing=0.1)
    with pytest.raises(ValueError, match="label_smoothing must be above 0"):
        pt.DPO(0.1, "exo_pair")
    with pytest.raises(ValueError, match="other divergences are for sigmoid"):
        pt.DPO(0.1, "nca_pair", divergence="forward_kl")
    with pytest.raises(ValueError, match="VESPO's weight is a correction"):
        pt.VESPO(correction=pt.RolloutCorrection())
    with pytest.raises(ValueError, match="a MixedPreference takes losses of pairs"):
        pt.MixedPreference(((1.0, pt.DPO()), (1.0, pt.SimPO())))
