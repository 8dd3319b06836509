"""Filters against their definitions, samples against their distribution."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.inference import GREEDY, Sampler
from maxlib.inference import _slots as slots
from maxlib.inference._sampling import Keys, best, draw, scaled

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.06, 0.04], [0.04, 0.06, 0.15, 0.25, 0.5]]))


def filtered(sampler, logits=LOGITS):
    return np.asarray(jax.jit(sampler.filtered)(logits))


def kept(sampler):
    return np.isfinite(filtered(sampler))


def test_filters_equal_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    """Of equal tokens at the end of a nucleus, as many are kept; transformers' sort decides which."""
    logits = jax.random.normal(jax.random.key(0), (4, 50)) * 3
    pairs = [
        (Sampler(top_k=7), process.TopKLogitsWarper(7)),
        (Sampler(top_p=0.8), process.TopPLogitsWarper(0.8)),
        (Sampler(min_p=0.1), process.MinPLogitsWarper(0.1)),
    ]
    for ours, theirs in pairs:
        want = theirs(None, torch.tensor(np.asarray(logits))).numpy()
        np.testing.assert_array_equal(np.isfinite(filtered(ours, logits)), np.isfinite(want))
        want = theirs(None, torch.tensor(np.asarray(jnp.round(logits)))).numpy()
        got = filtered(ours, jnp.round(logits))
        np.testing.assert_array_equal(np.isfinite(got).sum(1), np.isfinite(want).sum(1))


def test_draws_follow_the_distribution():
    keys, rows = jax.random.split(jax.random.key(1), 20_000), jnp.repeat(LOGITS[:1], 20_000, axis=0)
    for temperature in (1.0, 0.5):
        want = jax.nn.softmax(LOGITS[0] / temperature)
        got = np.bincount(jax.jit(Sampler(temperature=temperature))(rows, keys), minlength=5) / 20_000
        np.testing.assert_allclose(got, want, atol=5 * np.sqrt(0.25 / 20_000))


def test_draws_from_several_groups_of_tokens_follow_the_distribution():
    logits = np.random.default_rng(0).normal(size=150).astype(np.float32)
    logits[::3] = -np.inf
    keys, rows = jax.random.split(jax.random.key(2), 20_000), jnp.broadcast_to(logits, (20_000, 150))
    got, want = np.bincount(jax.jit(draw)(rows, keys), minlength=150) / 20_000, jax.nn.softmax(logits)
    assert (np.abs(got - want) <= 5 * np.sqrt(want / 20_000)).all()
    assert draw(jnp.full((1, 150), jnp.nan), keys[:1])[0] < 150  # an id, as every draw


def test_the_best_of_several_groups_is_the_first_of_equal_ones():
    logits = np.random.default_rng(0).integers(0, 4, (50, 150)).astype(np.float32)
    logits[0], logits[1, :130] = -np.inf, -5
    np.testing.assert_array_equal(best(jnp.asarray(logits)), logits.argmax(axis=1))


def test_greedy_takes_the_best():
    np.testing.assert_array_equal(GREEDY(LOGITS, jax.random.split(jax.random.key(0), 2)), [0, 4])


def allowed(logits, temperature, top_k, top_p, min_p):
    """Tokens that the definitions keep, in float64: k-th and its equals, smallest set of mass p, share of the best."""
    scores = (logits.astype(np.float64) - logits.max()) / temperature
    order = np.argsort(-scores, kind="stable")
    if top_k is not None:
        scores[scores < scores[order[min(top_k, len(order)) - 1]]] = -np.inf
    if top_p is not None:
        probs = np.exp(scores) / np.exp(scores).sum()
        # Rounding in float32 decides about a mass within 1e-6 of p; none of the cases below has one.
        mass = np.cumsum(probs[order])
        assert top_p == 1 or np.abs(mass - top_p).min() > 1e-6
        scores[order[np.argmax(mass >= min(top_p, mass[-1])) + 1 :]] = -np.inf
    if min_p is not None:
        scores[np.exp(scores) < min_p * np.exp(scores.max())] = -np.inf
    return np.isfinite(scores)


TIES = np.array([1, 3, 3, 3, 0, 3, 1, -np.inf, 2, 2.5], np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=1), dict(top_k=6), dict(top_k=99), dict(min_p=1.0), dict(top_p=0.05), dict(top_p=0.33), dict(top_p=0.62), dict(top_p=1.0),
        dict(top_p=1e-30), dict(min_p=0.3), dict(min_p=1e-30), dict(top_k=3, top_p=0.62),
        dict(top_k=6, top_p=0.85, min_p=0.1), dict(temperature=0.3, top_p=0.72), dict(temperature=1e-6, top_p=0.62),
        dict(temperature=1e-37),
    ],
    ids=str,
)  # fmt: skip
def test_filters_equal_their_definitions(settings):
    sampler = Sampler(**settings)
    random = np.random.default_rng(0).normal(size=10).astype(np.float32) * 3
    rows = np.stack([TIES, random, np.zeros(10, np.float32) + 7])
    logits = sampler.filtered(scaled(jnp.asarray(rows), sampler.temperature))
    want = [allowed(row, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p) for row in rows]
    np.testing.assert_array_equal(np.isfinite(logits), want)


@pytest.mark.parametrize("temperature", [1e-37, 1e-20, 1e-3])
def test_a_low_temperature_draws_the_best(temperature):
    logits = jnp.asarray([[40.0, -3.0, 41.0, 0.0], [-50.0, -60.0, -70.0, -jnp.inf]])
    sampler, keys = Sampler(temperature=temperature, top_p=0.9), jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(jax.jit(sampler)(logits, keys), [2, 0])
    settings = slots.Settings(jnp.full(2, temperature), jnp.full(2, 4), jnp.full(2, 0.9), jnp.full(2, -jnp.inf),
                              jnp.tile(jnp.array([1.0, 0, 0]), (2, 1)))  # fmt: skip
    data, features = jax.random.key_data(keys), slots.Features(samples=True, top_p=True)
    impl = str(jax.random.key_impl(keys))
    draws = jax.jit(slots._draw, static_argnums=(6, 7))(
        logits[:, None], data, jnp.zeros(2, jnp.int32), None, settings, None, features, impl
    )
    np.testing.assert_array_equal(draws.token[:, 0], [2, 0])
    np.testing.assert_array_equal(draws.log_prob[:, 0], [0, 0])


def test_draws_without_the_text_so_far_have_no_penalties():
    logits, keys = jnp.log(jnp.asarray([[0.6, 0.3, 0.1]] * 64)), jax.random.split(jax.random.key(0), 64)
    assert set(Sampler(top_p=0.7)(logits, keys).tolist()) == {0, 1}
    with pytest.raises(ValueError, match=r"penalties need the tokens so far: sample with inference\.LocalEngine"):
        Sampler(presence_penalty=1.0)(logits, keys)
    with pytest.raises(ValueError, match="repetition_penalty must be above 0"):
        Sampler(repetition_penalty=0)


def test_threads_never_get_one_key():
    keys = Keys(0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        data = pool.map(lambda _: tuple(np.asarray(jax.random.key_data(keys(None)))), range(64))
    assert len(set(data)) == 64


def test_filters_keep_what_they_promise():
    np.testing.assert_array_equal(kept(Sampler(top_k=2))[0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_k=9)), np.ones((2, 5)))
    np.testing.assert_array_equal(kept(Sampler(top_p=0.75))[0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_p=0.76))[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_p=0.01))[1], [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(kept(Sampler(min_p=0.3))[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_k=4, top_p=0.9, min_p=0.4))[0], [1, 1, 0, 0, 0])
