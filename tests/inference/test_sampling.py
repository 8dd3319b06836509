"""Filters against their definitions, samples against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.inference import GREEDY, Sampler

LOGITS = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.06, 0.04], [0.04, 0.06, 0.15, 0.25, 0.5]]))


def filtered(sampler, logits=LOGITS):
    return np.asarray(jax.jit(sampler.filtered)(logits))


def kept(sampler):
    return np.isfinite(filtered(sampler))


def test_filters_keep_what_they_promise():
    np.testing.assert_array_equal(kept(Sampler(top_k=2))[0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_k=9)), np.ones((2, 5)))
    np.testing.assert_array_equal(kept(Sampler(top_p=0.75))[0], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_p=0.76))[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_p=0.01))[1], [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(kept(Sampler(min_p=0.3))[0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_k=4, top_p=0.9, min_p=0.4))[0], [1, 1, 0, 0, 0])


def test_filters_equal_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = jax.random.normal(jax.random.key(0), (4, 50)) * 3
    pairs = [
        (Sampler(top_k=7), process.TopKLogitsWarper(7)),
        (Sampler(top_p=0.8), process.TopPLogitsWarper(0.8)),
        (Sampler(min_p=0.1), process.MinPLogitsWarper(0.1)),
    ]
    for ours, theirs in pairs:
        want = theirs(None, torch.tensor(np.asarray(logits))).numpy()
        np.testing.assert_array_equal(np.isfinite(filtered(ours, logits)), np.isfinite(want))


def test_draws_follow_the_distribution():
    keys, rows = jax.random.split(jax.random.key(1), 20_000), jnp.repeat(LOGITS[:1], 20_000, axis=0)
    for temperature in (1.0, 0.5):
        want = jax.nn.softmax(LOGITS[0] / temperature)
        got = np.bincount(jax.jit(Sampler(temperature=temperature))(rows, keys), minlength=5) / 20_000
        np.testing.assert_allclose(got, want, atol=5 * np.sqrt(0.25 / 20_000))


def test_greedy_takes_the_best():
    np.testing.assert_array_equal(GREEDY(LOGITS, jax.random.split(jax.random.key(0), 2)), [0, 4])


def test_the_narrowest_settings_keep_the_best_and_the_widest_all():
    for narrow in (Sampler(top_k=1), Sampler(min_p=1.0), Sampler(top_p=1e-6)):
        np.testing.assert_array_equal(kept(narrow)[0], [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(kept(Sampler(top_p=1.0)), np.ones((2, 5)))


@pytest.mark.parametrize("bad", [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(min_p=1.5)], ids=str)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampler(**bad)
