"""Engines that sample in threads: every batch in order, by weights of bounded age."""

import threading
import time

import numpy as np
import pytest

from maxlib import post_training as pt


class Engine:
    def __init__(self, seconds=0.0):
        self.version, self.seconds, self.used = None, seconds, 0

    def update(self, weights, version=None):
        self.version = weights

    def generate(self, prompts, **_):
        time.sleep(self.seconds)
        self.used += 1
        return self.version


def sample(engine, number):
    version = engine.generate([])
    return {"number": number, "version": version}, {"reward": number / 4}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_batch_is_older_than_the_limit(limit):
    engines, step = [Engine(0.003), Engine()], 0
    with pt.AsyncRollouts(sample, engines, lambda: step, max_staleness=limit) as rollouts:
        ages = []
        for step in range(12):
            batch = next(rollouts)
            assert batch["number"] == step and step - batch["version"] == rollouts.metrics()["staleness"]
            ages.append(step - batch["version"])
            time.sleep(0.002)  # the step
    assert max(ages) == limit and ages[0] == 0
    assert all(engine.used for engine in engines) or limit == 0


def test_rows_that_were_begun_with_older_weights_teach_nothing():
    def sample(engine, number):
        versions = np.array([engine.version, number - 3, number - 1])
        return {"targets": np.ones((3, 4), np.int32), "weight_versions": versions}, {}

    with pt.AsyncRollouts(sample, [Engine()], lambda: 0, max_staleness=1) as rollouts:
        batch = next(rollouts)
        assert batch.keys() == {"targets"} and batch["targets"][:, 0].tolist() == [1, -1, 1]
        assert rollouts.metrics() == {"staleness": 1, "stale": pytest.approx(1 / 3)}


def test_a_position_drops_what_was_sampled_ahead():
    step = 0
    with pt.AsyncRollouts(sample, [Engine()], lambda: step, max_staleness=2) as rollouts:
        next(rollouts)
        step = 1
        next(rollouts)
        state = rollouts.get_state()
        step = 2
        next(rollouts)
        rollouts.set_state(state)
        assert next(rollouts)["number"] == 2
        rollouts.reset()
        assert next(rollouts)["number"] == 0
    assert threading.active_count() < 50 and not rollouts._threads


def test_an_engine_that_fails_ends_the_run():
    def broken(engine, number):
        raise ValueError("no connection")

    with (
        pt.AsyncRollouts(broken, [Engine()], lambda: 0) as rollouts,
        pytest.raises(RuntimeError, match="no connection"),
    ):
        next(rollouts)
    with pytest.raises(ValueError, match="there must be an engine"):
        pt.AsyncRollouts(sample, [], lambda: 0)


def test_it_goes_on_after_close():
    rollouts = pt.AsyncRollouts(sample, [Engine()], lambda: 0, max_staleness=3)
    for number in range(3):
        assert next(rollouts)["number"] == number
        rollouts.close()
