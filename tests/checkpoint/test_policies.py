"""When steps are saved, which are kept, which process may write, and where."""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import checkpoint
from maxlib.checkpoint import Best, Checkpointer, DamagedError, InUseError, SaveError, Tiers, UnsavedError
from maxlib.checkpoint import _lock as owner
from maxlib.checkpoint import _policy as policy
from maxlib.checkpoint import _restore as restore
from maxlib.checkpoint import _storage as storage

NOISE = np.random.default_rng(0).normal(size=3000).astype(np.float32)  # what repeats would be compressed
ITEMS = {"params": {"w": jnp.asarray(NOISE)}}


def of(step):
    return {"params": {"w": ITEMS["params"]["w"].at[0].set(step)}}


def save(ck, *steps, **more):
    for step in steps:
        ck.save(step, of(step), **more)
    ck.wait()


def flip(step):
    """One bit of the array."""
    wanted = np.asarray(of(int(step.name))["params"]["w"]).tobytes()
    (file,) = (f for f in (step / "params").rglob("*") if f.is_file() and wanted in f.read_bytes())
    raw = bytearray(file.read_bytes())
    raw[raw.find(wanted) + 20] ^= 1
    file.write_bytes(raw)


# -------------------------------------------------------------------------------------- when, and which stay


def test_which_steps_stay():
    losses = {10: 3.0, 20: 1.0, 30: math.nan, 40: 2.0, 50: 1.5}
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    steps = [*losses, 60]  # 60 was saved without the metric
    kept = lambda **options: sorted(policy.Keep(**{"newest": 1} | options)(steps, metrics))
    assert kept(newest=2) == [50, 60]
    assert kept(newest=None) == steps
    assert kept(every=20) == [20, 40, 60]
    assert kept(best=Best("loss", 2)) == [20, 50, 60]
    assert kept(best=Best("loss", highest=True)) == [10, 60]
    assert kept(best=Best("absent", 3)) == [60]


def test_the_best_stay_across_restarts_and_the_metric_is_with_the_step(tmp_path):
    policies = {"keep": 1, "keep_every": 4, "best": Best("eval/loss")}
    with Checkpointer(tmp_path, **policies) as ck:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
            save(ck, step, metrics={"eval/loss": loss})
    with Checkpointer(tmp_path, **policies) as ck:
        assert ck.restore()["meta"]["metrics"] == {"eval/loss": 4.0}
        save(ck, 5, metrics={"eval/loss": 5.0})
        save(ck, 6)
        assert ck.steps() == [2, 4, 6]
        save(ck, 7, metrics={"eval/loss": 0.5})
        assert ck.steps() == [4, 7]


def test_the_best_stays_while_its_metrics_cannot_be_read(tmp_path, monkeypatch):
    def fails(path, *_, **options):
        raise OSError(5, "Input/output error")

    path = storage.absolute(tmp_path)
    assert restore.metrics(path) == {}  # there are none
    monkeypatch.setattr(type(path), "read_text", fails)
    with pytest.raises(OSError, match="Input/output error"):  # with which nothing is deleted
        restore.metrics(path)


def test_best_by_a_metric_that_is_not_there_is_said_once(tmp_path, caplog):
    with Checkpointer(tmp_path / "a", best=Best("eval_loss")) as ck:
        save(ck, 1, 2, metrics={"loss": 2.0, "eval/loss": 1.0})
    (said,) = [record.getMessage() for record in caplog.records]
    assert "without the metric 'eval_loss'" in said and said.endswith("['eval/loss', 'loss'].")
    caplog.clear()
    with Checkpointer(tmp_path / "b", best=Best("eval/loss")) as ck:
        save(ck, 1, metrics={"eval/loss": 1.0})
        save(ck, 2)
    assert not caplog.records


@pytest.mark.parametrize("keep", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_that_goes_back_replaces_what_came_later(tmp_path, keep):
    policies = {"keep": keep, "replace": True}
    with Checkpointer(tmp_path, keep=None) as ck:
        save(ck, 50, 100, 150)
    with Checkpointer(tmp_path, **policies) as ck:
        ck.restore(50)
        save(ck, 60)
        assert ck.steps() == [50, 60][-keep:]
    with Checkpointer(tmp_path, **policies) as ck:
        assert ck.restore()["meta"]["step"] == ck.latest() == 60
        save(ck, 70, 80)
        assert ck.steps() == [50, 60, 70, 80][-keep:]


def test_later_steps_stay_until_the_one_that_replaces_them_is_whole(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, replace=True) as ck:
        save(ck, 50, 100, 150)
        ck.restore(50)
        written = storage.Steps.wait
        monkeypatch.setattr(storage.Steps, "wait", lambda self: (written(self), flip(tmp_path / "60"))[0])
        with pytest.raises(SaveError, match="Step 60 could not"):
            save(ck, 60)
        monkeypatch.setattr(storage.Steps, "wait", written)
        assert ck.steps() == [50, 100, 150]
        save(ck, 60)
        assert ck.steps() == [50, 60]


def test_replace_writes_a_step_of_its_own_anew(tmp_path):
    value = lambda ck: float(ck.restore(5)["params"]["w"][0])
    with Checkpointer(tmp_path, replace=True) as ck:
        save(ck, 5)
        ck.save(5, of(7))
        assert value(ck) == 7
        ck.save(5, of(8), overwrite=False)
        assert value(ck) == 7
    with Checkpointer(tmp_path) as ck:
        ck.restore(5)
        ck.save(5, of(8))
        assert value(ck) == 7


def test_a_save_is_due_by_steps_and_by_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(policy.time, "monotonic", lambda: now[0])
    with Checkpointer(tmp_path, every=4, seconds=60) as ck:
        due = []
        for step in range(1, 11):
            now[0] += 25
            if ck.should_save(step):
                assert ck.should_save(step)  # asking changes nothing
                save(ck, step)
                due.append(step)
    assert due == [3, 4, 7, 8]


@pytest.mark.parametrize(("policies", "due"), [({}, [4, 8]), ({"every": 3}, [3, 6]), ({"seconds": math.inf}, [])])
def test_half_an_hour_is_the_longest_wait_where_nothing_is_said(tmp_path, monkeypatch, policies, due):
    now = [100.0]
    monkeypatch.setattr(policy.time, "monotonic", lambda: now[0])
    saved = []
    with Checkpointer(tmp_path, **policies) as ck:
        for step in range(1, 9):
            now[0] += 500
            if ck.should_save(step):
                save(ck, step)
                saved.append(step)
    assert saved == due


def test_policies_that_make_no_sense(tmp_path):
    for wrong in ({"keep": 0}, {"every": 0}, {"seconds": -1.0}, {"keep_every": 0}, {"best": Best("loss", 0)}):
        with pytest.raises(ValueError, match="must be positive, got"):
            Checkpointer(tmp_path, **wrong)


# -------------------------------------------------------------------------------------- written, and read again


def test_what_was_written_is_read_again_before_the_step_before_goes(tmp_path, monkeypatch):
    written = storage.Steps.wait

    def bad_disk(self):
        written(self)
        if (tmp_path / "2").exists():
            flip(tmp_path / "2")

    monkeypatch.setattr(storage.Steps, "wait", bad_disk)
    with Checkpointer(tmp_path, keep=1) as ck:
        save(ck, 1)
        with pytest.raises(
            SaveError, match=r"Step 2 could not.*\(its files differ from what was saved(.|\n)*params: w.*step 1 is"
        ) as e:
            save(ck, 2)
        assert e.value.step == 2 and ck.steps() == [1] and ck.verify(1) == []
        assert (tmp_path / "2.damaged").is_dir()
        save(ck, 3)
        assert ck.steps() == [3]


def test_it_is_read_again_only_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint._restore, "damaged_leaves", lambda *_: pytest.fail("it was read"))
    with Checkpointer(tmp_path, verify=False) as ck:
        save(ck, 1)


def test_a_newest_step_that_is_half_deleted_is_said_and_the_one_before_taken(tmp_path, caplog):
    with Checkpointer(tmp_path / "run") as ck:
        save(ck, 1, 2)
    names = sorted(p.relative_to(tmp_path / "run" / "2") for p in (tmp_path / "run" / "2").rglob("*"))
    assert len(names) > 8
    for name in [n for n in names if len(n.parts) <= 2]:
        here = shutil.copytree(tmp_path / "run", tmp_path / "copy", dirs_exist_ok=True)
        (shutil.rmtree if (here / "2" / name).is_dir() else os.remove)(here / "2" / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                got = checkpoint.load(here, {"params": ITEMS["params"]})
            except DamagedError:
                pytest.fail(f"without {name} no step is found")
        said = [r.message for r in caplog.records if r.name.startswith("maxlib")]
        assert got["params"]["w"][0] == got["meta"]["step"]
        assert got["meta"]["step"] == 2 or ("Step 2" in said[0] and "Restored step 1" in said[-1]), name
        shutil.rmtree(here)


# -------------------------------------------------------------------------------------- one run at a time


THEIRS = {"run": "another", "pid": 1, "host": "there", "since": "yesterday"}


def test_the_newest_run_owns_the_directory_and_is_told_of_the_other(tmp_path, caplog):
    (tmp_path / owner.FILE).write_text(json.dumps(THEIRS))
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as ck:
        save(ck, 1)
        assert json.loads((tmp_path / owner.FILE).read_text())["pid"] == os.getpid()
    assert "taken over from process 1 on there (since yesterday)" in caplog.records[0].message
    assert not (tmp_path / owner.FILE).exists()
    caplog.clear()
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path):
        assert not caplog.records  # it was released


def test_the_same_process_may_open_it_twice(tmp_path):
    with Checkpointer(tmp_path) as a:
        with Checkpointer(tmp_path) as b:
            save(b, 1)
        save(a, 2)
        assert (tmp_path / owner.FILE).exists()
    assert not (tmp_path / owner.FILE).exists()


@pytest.mark.parametrize("record", ["{", None], ids=["being written", "taken and released"])
def test_a_run_whose_directory_was_taken_stops_at_its_next_save(tmp_path, record):
    with Checkpointer(tmp_path) as ck:
        save(ck, 1)
        if record is None:
            (tmp_path / owner.FILE).unlink()
        else:
            (tmp_path / owner.FILE).write_text(record)
        with pytest.raises(InUseError, match="was taken over by .*stop one of the two"):
            save(ck, 2)
    assert ck.steps() == [1]
    assert (tmp_path / owner.FILE).exists() == (record is not None)  # what is not ours stays


def test_a_run_whose_directory_is_taken_while_it_saves_is_told_so(tmp_path, monkeypatch):
    def taken(*_):
        (tmp_path / owner.FILE).write_text(json.dumps(THEIRS))
        raise FileNotFoundError("the other run has cleaned it away")

    monkeypatch.setattr(checkpoint._records, "manifest_text", taken)  # in the background
    with Checkpointer(tmp_path) as ck:
        ck.save(1, ITEMS)
        with pytest.raises(InUseError, match="was taken over by process 1 on there"):
            ck.wait()


TAKES = """
import sys
from maxlib.checkpoint import Checkpointer, InUseError
ck = Checkpointer(sys.argv[1])
for line in sys.stdin:
    try:
        ck.save(int(line), {"params": {"x": __import__("numpy").ones(3)}})
        ck.wait()
        print("saved", flush=True)
    except InUseError as error:
        print(error, flush=True)
"""


@pytest.mark.full
def test_of_two_live_runs_the_older_stops(tmp_path):
    def ask(run: subprocess.Popen, step: int) -> str:
        assert run.stdin and run.stdout
        run.stdin.write(f"{step}\n")
        run.stdin.flush()
        return run.stdout.readline().strip()

    def start() -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", TAKES, tmp_path], **pipes)

    with start() as old:
        assert ask(old, 1) == "saved"
        with start() as new:
            assert ask(new, 2) == "saved"  # at once, without a wait for a sign of life
            assert f"was taken over by process {new.pid}" in ask(old, 3)
            assert ask(new, 4) == "saved"
            new.kill()
        old.kill()
    with Checkpointer(tmp_path) as ck:
        assert ck.steps() == [1, 2, 4]


# -------------------------------------------------------------------------------------- saves that fail


@pytest.mark.parametrize(("limits", "fails"), [({}, 3), ({"max_failed_saves": 1}, 1)])
def test_a_run_ends_after_too_many_failed_saves(tmp_path, monkeypatch, limits, fails):
    ck = Checkpointer(tmp_path, **limits)
    save(ck, 1)
    monkeypatch.setattr(ck._steps, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for i in range(1, fails + 1):
        assert ck.unsaved() is None
        with pytest.raises(
            SaveError, match=rf"Step {1 + i} could not be saved.*No space left.*step 1 is the last good"
        ):
            save(ck, 1 + i)
    error = ck.unsaved()
    assert isinstance(error, UnsavedError) and error.last_good == 1
    assert f"{fails} consecutive saves failed, the last with: [Errno 28] No space left on device" in str(error)
    monkeypatch.undo()
    save(ck, 10)
    assert ck.unsaved() is None  # one that is good begins the count anew
    ck.close()


def test_a_run_goes_on_while_one_tier_can_be_written(tmp_path, monkeypatch):
    near, far = (Checkpointer(tmp_path / name, max_failed_saves=1) for name in ("near", "far"))
    broken = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    with Tiers(near, far) as tiers:
        monkeypatch.setattr(near._steps, "save", broken)
        with pytest.raises(SaveError, match="Input/output error"):
            tiers.save(1, ITEMS)
        assert near.unsaved() and tiers.unsaved() is None
        far.wait()
        monkeypatch.setattr(far._steps, "save", broken)
        with pytest.raises(SaveError, match="Input/output error"):
            tiers.save(2, ITEMS)
        error = tiers.unsaved()
    assert error is not None and error.last_good == 1


# -------------------------------------------------------------------------------------- tiers


def make_tiers(root):
    return Tiers(Checkpointer(root / "near", every=1, keep=1), Checkpointer(root / "far", every=3, keep=2))


def test_the_newest_of_all_tiers_is_restored_and_the_end_is_in_each(tmp_path):
    with make_tiers(tmp_path) as ck:
        for step in range(1, 6):
            assert ck.should_save(step)
            ck.save(step, of(step))
        ck.wait()
        assert [tier.steps() for tier in ck.tiers] == [[5], [3]] and ck.steps() == [3, 5] and ck.latest() == 5
    with make_tiers(tmp_path) as ck:
        assert ck.restore(like=ITEMS)["params"]["w"][0] == 5
        ck.save(5, of(5))  # nothing is left to do: the end is saved in all
    assert [tier.steps() for tier in ck.tiers] == [[5], [3, 5]]


def test_a_run_that_stops_where_no_tier_was_due_is_saved_in_each(tmp_path):
    tiers = [Checkpointer(tmp_path / name, every=every) for name, every in (("near", 2), ("far", 3))]
    with Tiers(*tiers) as ck:
        assert not ck.should_save(5)
        ck.save(5, of(5))
    assert [tier.steps() for tier in ck.tiers] == [[5], [5]]


@pytest.mark.parametrize("harm", [flip, pytest.param(shutil.rmtree, marks=pytest.mark.full)], ids=["flipped", "lost"])
def test_a_near_step_that_is_bad_or_lost_costs_the_way_from_the_far_one(tmp_path, harm, caplog):
    with make_tiers(tmp_path) as ck:
        for step in range(1, 6):
            ck.should_save(step)
            ck.save(step, of(step))
    harm(tmp_path / "near" / "5")
    with make_tiers(tmp_path) as ck, caplog.at_level(logging.WARNING):
        assert ck.restore()["meta"]["step"] == 3
        if harm is flip:
            assert "Step 5" in caplog.records[0].message and "Restored step 3" in caplog.records[1].message
        for step in range(4, 7):
            ck.should_save(step)
            ck.save(step, of(step))
    assert [tier.steps() for tier in ck.tiers] == [[6], [3, 6]]
    assert checkpoint.load(tmp_path / "near")["params"]["w"][0] == 6


def test_a_tier_that_fails_keeps_no_other_from_being_written(tmp_path, monkeypatch):
    with make_tiers(tmp_path) as ck:
        monkeypatch.setattr(
            ck.tiers[0], "save", lambda *_: (_ for _ in ()).throw(SaveError("the near disk is full", step=1))
        )
        with pytest.raises(SaveError, match="the near disk is full"):
            ck.save(1, ITEMS)
    assert [tier.steps() for tier in ck.tiers] == [[], [1]]


def test_all_hosts_restore_the_steps_that_the_first_one_sees(monkeypatch):
    """A network disk may show them at different times."""
    monkeypatch.setattr("maxlib.distributed.allgather_json", lambda value: [[[2, 0]], value])
    near = SimpleNamespace(directory="near", steps=lambda: [2, 4], adopt=print, wait=print)
    near.restore = lambda step, like: {"meta": {"step": step}}
    tiers = object.__new__(checkpoint.Tiers)
    tiers.tiers = (near,)
    assert tiers.restore()["meta"]["step"] == 2


def test_a_full_disk_is_seen_before_orbax_waits_for_other_hosts(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("maxlib.distributed._processes.allgather_json", lambda value: [value, None])
    monkeypatch.setattr(type(storage.absolute(tmp_path)), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        storage.Steps._check_possible(SimpleNamespace(directory=storage.absolute(tmp_path)), 1)
