"""A run killed with SIGKILL at any moment and resumed equals the uninterrupted run, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from maxlib import checkpoint
from tests.training import killed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[bytes]:
    return content(killed.train(str(tmp_path_factory.mktemp("uninterrupted")))[0])


def content(state: dict) -> list[bytes]:
    state["rest"]["key"] = jax.random.key_data(state["rest"]["key"])
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def start(directory: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.killed", directory], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def kill(child: subprocess.Popen, when: str, delay: float) -> bool:
    """Kills the child `delay` seconds after it printed `when`; returns False if it finished first."""
    assert child.stdout is not None
    with child:
        for line in child.stdout:
            if line.strip() == when:
                time.sleep(delay)
                child.send_signal(signal.SIGKILL)
    return child.returncode == -signal.SIGKILL


MOMENTS = [("step 10", 0.0), ("saving 8", 0.0), ("saving 12", 0.01)]


@pytest.mark.parametrize("moments", [MOMENTS[1:2], pytest.param(MOMENTS, marks=pytest.mark.full)], ids=["one", "all"])
def test_killed_while_training_and_while_saving(tmp_path, uninterrupted, moments):
    runs = [tmp_path / str(i) for i in range(len(moments))]
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda run, moment: kill(start(run), *moment), runs, moments))
    for run, (when, _) in zip(runs, moments, strict=True):
        state, begin = killed.train(str(run))
        # A save waits for the one before, so that one at least is there.
        assert begin in {"step 10": (4, 8), "saving 8": (4, 8), "saving 12": (8, 12)}[when]
        assert content(state) == uninterrupted
        assert sorted(p.name for p in run.iterdir()) == ["12", "16"]  # nothing half-written stays


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_killed_again_and_again(tmp_path, uninterrupted, seed):
    """Each child goes on where the one before was killed; after every kill the two newest steps are whole."""
    rng = random.Random(seed)
    for _ in range(8):
        begin = max(steps(tmp_path), default=0)
        word, ahead = ("step", rng.randint(1, 6)) if rng.random() < 0.3 else ("saving", rng.choice([4, 8]))
        if begin + ahead > killed.STEPS:
            break
        assert kill(start(tmp_path), f"{word} {begin + ahead}", rng.random() ** 2 * 0.1)
        for number in steps(tmp_path)[-2:]:  # an older one may be half-deleted
            assert checkpoint.verify(tmp_path / str(number)) == []
    state, _ = killed.train(str(tmp_path))
    assert content(state) == uninterrupted


def steps(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())
