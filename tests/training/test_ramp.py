"""Batches that grow, schedules by tokens, and shapes of the decay."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import training
from tests.training import tiny


def test_batches_are_joined_and_rows_cut_as_the_run_goes_on():
    plain = [next(loader) for loader in [tiny.Loader()] for _ in range(7)]
    ramp = training.Ramp(tiny.Loader(), batches={0: 1, 2: 2}, pieces={0: 3, 1: 2, 3: 1})
    batches = [next(ramp) for _ in range(4)]
    assert [batch["tokens"].shape for batch in batches] == [(24, 4), (16, 6), (32, 6), (16, 12)]
    used = [[0], [1], [2, 3], [4, 5]]
    for batch, numbers in zip(batches, used, strict=True):
        for name in ("tokens", "targets"):
            want = np.concatenate([plain[n][name] for n in numbers])
            np.testing.assert_array_equal(batch[name].reshape(want.shape), want)


def test_it_resumes():
    ramp, again = (training.Ramp(tiny.Loader(), batches={0: 1, 2: 3}) for _ in range(2))
    for _ in range(3):
        next(ramp)
    again.set_state(ramp.get_state())
    np.testing.assert_array_equal(next(again)["tokens"], next(ramp)["tokens"])
    ramp.reset()
    assert next(ramp)["tokens"].shape[0] == 8


def test_states_of_hosts_are_joined():
    """Hosts read other shards, whose states a checkpoint joins by name: none may be under a name that all have."""
    hosts = [training.Ramp(tiny.Loader(), batches={0: 1, 2: 3}) for _ in range(2)]
    for ramp, shard in zip(hosts, "01", strict=True):
        loader = ramp.loader
        loader.get_state = lambda loader=loader, shard=shard: {shard: {"next": loader.next}}
        loader.set_state = lambda state, loader=loader, shard=shard: setattr(loader, "next", state[shard]["next"])
        next(ramp)
    joined = {name: value for ramp in hosts for name, value in ramp.get_state().items()}
    for ramp in hosts:
        want = next(ramp)
        ramp.reset()
        ramp.set_state(joined)
        np.testing.assert_array_equal(next(ramp)["tokens"], want["tokens"])


def test_a_run_with_a_ramp(monkeypatch):
    tiny.share_steps(monkeypatch)
    ramp = training.Ramp(tiny.Loader(), batches={0: 1, 2: 2})
    trainer = training.Trainer(tiny.model, optax.sgd(0.1), ramp, loss=tiny.loss)
    rows = {}
    trainer.writers.append(types.SimpleNamespace(resume=id, write=rows.__setitem__, close=int))
    assert trainer.fit(4)["num_targets"] == 2 * 8 * 12
    before, after = (rows[step]["model_tflops_per_second"] * rows[step]["seconds"] for step in (2, 3))
    assert after == pytest.approx(2 * before)


@pytest.mark.parametrize("batches", [{1: 1}, {0: 0}])
def test_a_ramp_begins_at_step_0_with_at_least_one(batches):
    with pytest.raises(ValueError, match="must begin at step 0 and have numbers of at least 1"):
        training.Ramp([tiny.batch()], batches=batches)


def test_schedules_by_tokens_follow_the_ramp():
    ramp = training.Ramp([tiny.batch()], batches={0: 1, 10: 2, 20: 4})
    tokens = ramp.tokens_before(100)
    sizes = [100] * 10 + [200] * 10 + [400] * 10
    assert [float(tokens(step)) for step in range(30)] == [float(sum(sizes[:step])) for step in range(30)]
    schedule = training.by_tokens(lambda n: n / 2, tokens)
    assert float(schedule(25)) == (1000 + 2000 + 2000) / 2
    assert float(training.by_tokens(lambda n: n, 1000)(7)) == 7000


@pytest.mark.parametrize("kind", ["cosine", "linear", "stable"])
def test_schedules_of_more_tokens_than_an_integer_counts(kind):
    """10¹¹ tokens, as in the example of `by_tokens`; the warm-up is longer than 2³¹ too."""
    total, warmup, decay, each = 10**11, 5 * 10**9, 2 * 10**10, 4_000_000
    make = {
        "cosine": functools.partial(training.warmup_cosine, end_fraction=0.1),
        "linear": training.warmup_linear,
        "stable": functools.partial(training.warmup_stable_decay, decay=decay),
    }[kind]
    schedule = jax.jit(training.by_tokens(make(2.0, total, warmup=warmup), each))
    begin = total - decay if kind == "stable" else warmup
    for step in (0, 625, 1249, 1250, 10_000, 21_000, 24_999, 25_000, 30_000):
        tokens = step * each
        done = np.clip((tokens - begin) / (total - begin), 0, 1)
        want = 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2 if kind == "cosine" else 1 - done
        want = (tokens + 1) / (warmup + 1) if tokens < warmup else want
        np.testing.assert_allclose(schedule(jnp.int32(step)), 2 * want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_of_the_decay(shape, half):
    schedule = training.warmup_stable_decay(2.0, 100, warmup=10, decay=20, end_fraction=0.1, shape=shape)
    assert float(schedule(0)) == pytest.approx(2 / 11) and float(schedule(10)) == float(schedule(80)) == 2.0
    assert float(schedule(90)) == pytest.approx(2 * (0.1 + 0.9 * half), rel=1e-6)
    assert float(schedule(100)) == float(schedule(150)) == pytest.approx(0.2, rel=1e-6)
    quarter = {"linear": 0.75, "cosine": 0.5 + 0.5**1.5, "sqrt": 0.5}[shape]
    assert float(schedule(85)) == pytest.approx(2 * (0.1 + 0.9 * quarter), rel=1e-6)
