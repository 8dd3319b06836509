"""Saves leak no threads or file descriptors, whether they succeed or fail."""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax
import pytest

from maxlib import checkpoint
from maxlib.checkpoint import Checkpointer, SaveError

ITEMS = {"params": {"w": np.arange(1000.0)}, "opt": {"count": np.array(3)}}


def held(expected: tuple[int, int] = (1 << 30, 1 << 30)) -> tuple[int, int]:
    """Threads of Python and open descriptors of this process; those that were told to go are given time to."""
    for i in range(20):
        if i % 10 == 0:  # takes longer than the wait, and frees what cycles hold the first time
            gc.collect()
        counts = threading.active_count(), len(os.listdir("/proc/self/fd"))
        if counts[0] <= expected[0] and counts[1] <= expected[1]:
            break
        time.sleep(0.1)
    return counts


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Leaves out of collections what earlier tests hold, which takes a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    """Fewer may be left: what an earlier test has started may end in between."""
    return now[0] <= before[0] and now[1] <= before[1]


@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.full)])
def test_saves_hold_no_threads_and_no_descriptors(tmp_path, verify):
    before = held()
    with Checkpointer(tmp_path, keep=2, verify=verify) as ck:
        counts = []
        for step in range(1, 7):
            ck.save(step, ITEMS)
            if step % 2 == 0:
                ck.wait()
                counts.append(held(*counts[:1]))
    assert counts[0] == counts[1] == counts[2]
    assert no_more(held(before), before)


def test_saves_that_fail_hold_none_either(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as ck:
        ck.save(1, ITEMS)
        ck.wait()
        before = held()
        for where, name in ((checkpoint._records, "manifest_text"), (ck._steps._orbax, "save_checkpointables_async")):
            with monkeypatch.context() as patched:
                patched.setattr(where, name, broken)  # in the background, and before it begins
                for step in range(2, 5):
                    with pytest.raises(SaveError):
                        ck.save(step, ITEMS)
                        ck.wait()
        assert no_more(held(before), before)


def test_a_run_that_ends_while_it_saves_holds_none(tmp_path):
    before = held()
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as ck:
        ck.save(1, ITEMS)
        raise ZeroDivisionError
    assert no_more(held(before), before)


FEW = """
import os, resource, sys
import numpy as np
from maxlib.checkpoint import Checkpointer, SaveError
with Checkpointer(sys.argv[1]) as ck:
    ck.save(1, {"params": {"w": np.ones(10)}})
    ck.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, 4096))
    try:
        ck.save(2, {"params": {"w": np.ones(10)}})
    except SaveError as error:
        print(error)
"""


@pytest.mark.full
def test_too_few_descriptors_are_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", FEW, tmp_path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert "raise the limit (ulimit -n)" in done.stdout and "step 1 is the last good one" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not [line for line in done.stderr.splitlines() if "Error" in line or "Traceback" in line], done.stderr


def test_a_trainer_says_failed_saves_in_a_line_each_and_ends(tmp_path, capsys, monkeypatch):
    from maxlib import training
    from tests.training import tiny

    tiny.share_steps(monkeypatch)
    checkpointer = Checkpointer(tmp_path / "run", every=1, keep=2)
    trainer = training.Trainer(
        tiny.model,
        optimizer=optax.sgd(0.1),
        loader=tiny.Loader(),
        loss=tiny.loss,
        checkpointer=checkpointer,
        callbacks=[(3, lambda trainer: full_disk(checkpointer, tmp_path))],
    )
    with pytest.raises(checkpoint.UnsavedError, match="3 consecutive saves failed, the last with: .*Not a directory"):
        trainer.fit(100)
    assert trainer.step == 5
    said = [" ".join(part.split()) for part in capsys.readouterr().out.split("NOT SAVED: ")[1:]]
    assert said[0].startswith("Step 3 could not be saved") and "step 2 is the last good one" in said[0]
    assert said[1].startswith("Step 4 could not be saved")
    (tmp_path / "run").unlink()
    (tmp_path / "aside").rename(tmp_path / "run")
    assert checkpoint.verify(tmp_path / "run" / "2") == []


def full_disk(checkpointer: Checkpointer, root: Path) -> None:
    """Nothing can be written any more, by root neither."""
    if (root / "run").is_dir():
        checkpointer.wait()
        (root / "run").rename(root / "aside")
        (root / "run").write_text("in the way")
