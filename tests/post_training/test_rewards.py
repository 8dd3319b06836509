"""Rewards in processes: a failure costs at most its timeout and is counted, without affecting other rewards."""

import collections
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from maxlib.post_training import RewardPool
from tests.post_training import rewards

ITEMS = ["fine", "hang", "raise", "nan", "die", "infinite", "none", "words", "good", "well"]


def test_what_goes_wrong_is_no_score_and_is_counted():
    with RewardPool([rewards.odd, rewards.length], processes=2, timeout=1.5) as pool:
        pool(["warm", "up"])
        begin = time.monotonic()
        scores = pool(ITEMS)
        seconds = time.monotonic() - begin
        again = pool(["fine", "good"])
        broken_off = pool._results([collections.deque([((9, 9), 1, "long")] * 4)] * 2)
        next(broken_off)
        broken_off.close()  # as Ctrl-C does; the other answers are of no later call
        waiting = next(worker for worker in pool._workers if worker.ready)  # another may still be starting
        waiting.process.kill()
        waiting.process.join()
        texts = [["x" * n for n in range(start, start + 40)] for start in (0, 100)]
        with ThreadPoolExecutor(2) as threads:  # as engines of AsyncRollouts
            at_once = list(threads.map(lambda items: pool(items)[:, 1].tolist(), texts))
    assert at_once == [[*map(len, items)] for items in texts]
    good = math.nan
    assert np.array_equal(scores[:, 0], [1, *[good] * 7, 1, 1], equal_nan=True)
    assert scores[:, 1].tolist() == [len(text) for text in ITEMS]  # rewards beside it are not touched
    assert pool.metrics() == {"reward_timeout": 1, "reward_error": 3, "reward_nan": 2}
    assert seconds >= 1.5 and again.tolist() == [[1, 4], [1, 4]]


def test_a_process_that_cannot_begin_is_an_error():
    with RewardPool(rewards.odd, processes=1) as pool:
        pool._workers[0].process.kill()
        with pytest.raises(RuntimeError, match="ended before it was ready"):
            pool(["fine"])
    for wrong in ({"processes": 0}, {"timeout": 0.0}):
        with pytest.raises(ValueError, match="must be positive"):
            RewardPool(rewards.odd, **wrong)


def test_its_processes_do_not_wait_for_jax():
    """They start again after each deadline that is missed."""
    code = "import sys, maxlib.post_training._pools; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
