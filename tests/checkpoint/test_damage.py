"""Damaged checkpoints are detected and named; intact ones stay readable."""

import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import checkpoint
from maxlib.checkpoint import Checkpointer, DamagedError, SaveError

ITEMS = {
    "params": {
        "layers.groups.0.0.w": np.random.default_rng(0).normal(size=(60, 50)).astype(np.float32),
        "scale": np.ones(3, np.float32),
    },
    "opt": {"count": np.array(3, np.int32), "mu": np.random.default_rng(1).normal(size=(60, 50)).astype(np.float32)},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    with Checkpointer(directory) as ck:
        for step in (1, 2, 3):
            ck.save(step, ITEMS | {"step": {"n": np.array(step)}}, data={"0": {"n": step}}, meta={"config": {"dim": 3}})
    return directory


@pytest.fixture
def run(written, tmp_path) -> Path:
    """A copy: a checkpoint may be moved."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def flip(file: Path, at: int, bit: int = 0):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << bit
    file.write_bytes(raw)


def file_of(step: Path, item: str, array: np.ndarray) -> tuple[Path, int]:
    """Where the bytes of an array lie."""
    places = [(f, f.read_bytes().find(array.tobytes())) for f in (step / item).rglob("*") if f.is_file()]
    return next((f, at) for f, at in places if at >= 0)


def test_a_copy_is_whole(run):
    got = checkpoint.load(run)
    assert got["meta"]["step"] == 3
    assert checkpoint.verify(run / "3") == []
    shutil.move(run / "3", run.parent / "elsewhere")  # one step, under another name
    np.testing.assert_array_equal(checkpoint.load(run.parent / "elsewhere")["params"]["scale"], np.ones(3))
    assert checkpoint.verify(run.parent / "elsewhere") == []


@pytest.mark.parametrize("name", ["layers.groups.0.0.w", "mu"])
def test_one_flipped_bit_is_refused_by_the_name_of_its_leaf(run, name):
    item = next(item for item, leaves in ITEMS.items() if name in leaves)
    file, at = file_of(run / "3", item, ITEMS[item][name])
    flip(file, at + 4321)
    for read in (lambda: checkpoint.load(run / "3"), lambda: Checkpointer(run).restore(3)):
        with pytest.raises(DamagedError, match=rf"Step 3 in {run} is damaged.*\n  {item}: {name}$") as error:
            read()
        assert (error.value.step, error.value.leaves) == (3, (f"{item}: {name}",))
    assert checkpoint.verify(run / "3") == [f"{item}: {name}"]
    other = {"params": "opt", "opt": "params"}[item]
    assert set(checkpoint.load(run / "3", items=[other])) == {other, "data", "meta"}  # what is whole can still be had


def test_the_step_before_is_taken_and_said(run, caplog):
    file, at = file_of(run / "3", "params", ITEMS["params"]["layers.groups.0.0.w"])
    flip(file, at)
    (run / "2" / "meta" / "meta.json").unlink()
    with caplog.at_level(logging.WARNING), Checkpointer(run) as ck:
        assert ck.latest() == 3  # its records are whole
        got = ck.restore()
        assert (got["meta"]["step"], got["data"], got["step"]["n"]) == (1, {"0": {"n": 1}}, 1)
        assert ck.latest() == 1
    said = [r.message for r in caplog.records if r.name.startswith("maxlib")]
    assert "Step 3" in said[0] and "params: layers.groups.0.0.w" in said[0]
    assert "Step 2" in said[1] and "meta.json" in said[1]
    assert "Restored step 1" in said[2]


def test_training_goes_on_from_there(run):
    file, at = file_of(run / "3", "params", ITEMS["params"]["layers.groups.0.0.w"])
    flip(file, at)
    with Checkpointer(run) as ck:
        assert ck.restore()["meta"]["step"] == 2
        ck.save(3, ITEMS)
        ck.wait()
        assert (ck.steps(), ck.verify(3)) == ([1, 2, 3], [])
    assert (run / "3.damaged").is_dir()
    assert checkpoint.load(run)["meta"]["step"] == 3


def test_when_nothing_is_left(run, caplog):
    for step in (1, 2, 3):
        shutil.rmtree(run / str(step) / "opt")
    with pytest.raises(
        DamagedError, match="no undamaged step left:\n  Step 3(.|\n)*opt: missing entirely(.|\n)*Step 1"
    ):
        checkpoint.load(run)
    caplog.clear()
    with caplog.at_level(logging.WARNING), Checkpointer(run) as ck:
        assert ck.latest() is None
        assert len([r for r in caplog.records if "is damaged" in r.message]) == 3
        ck.save(1, ITEMS)  # a run that starts anew
    assert {"1", "1.damaged", "2.damaged", "3.damaged"} == {p.name for p in run.iterdir()}


def damage(rng: random.Random, file: Path) -> None:
    size = file.stat().st_size
    match rng.choice(["flip", "cut", "delete"]):
        case "flip" if size:
            flip(file, rng.randrange(size), rng.randrange(8))
        case "cut" if size:
            file.write_bytes(file.read_bytes()[: rng.randrange(size)])
        case _:
            file.unlink()


def check_damage(run: Path, rounds: int, seed: int) -> None:
    """Any damage to any file: either all comes back as it was, or DamagedError."""
    rng, undamaged, step = random.Random(seed), checkpoint.load(run / "3"), run / "3"
    like = jax.tree.map(jnp.asarray, {name: undamaged[name] for name in ("params", "opt")}) if seed % 2 else None
    # Some names are random: by folder and size, a seed damages the same files in every run.
    order = lambda file: (file.parent, file.stat().st_size)
    files, refused = sorted((f for f in step.rglob("*") if f.is_file()), key=order), 0
    for _ in range(rounds):
        file = rng.choice(files)
        before = file.read_bytes()
        damage(rng, file)
        try:
            got = checkpoint.load(step, like)
        except DamagedError as error:
            refused += bool(error.leaves)
        else:
            for item in like or ITEMS:
                for name, want in undamaged[item].items():
                    np.testing.assert_array_equal(got[item][name], want)
            assert (got["data"], got["meta"]) == (undamaged["data"], undamaged["meta"])
        file.write_bytes(before)
    assert refused > rounds // 10


def test_any_damage_to_any_file(run):
    check_damage(run, rounds=5, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 9))
def test_much_damage_to_any_file(run, seed):
    check_damage(run, rounds=250, seed=seed)


def test_a_directory_that_cannot_be_written(tmp_path):
    """Below a regular file nobody can write, root neither."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot be written"):
        Checkpointer(tmp_path / "file" / "run")

    run, aside = tmp_path / "run", tmp_path / "aside"
    with Checkpointer(run) as ck:
        ck.save(1, ITEMS)
        ck.wait()
        run.rename(aside)
        run.write_text("in the way")
        with pytest.raises(SaveError, match=r"Step 2 could not be saved to .*Not a directory") as error:
            ck.save(2, ITEMS)
            ck.wait()
        assert error.value.step == 2
        run.unlink()
        aside.rename(run)
        assert (ck.latest(), ck.verify(1)) == (1, [])
        ck.save(3, ITEMS)
    assert ck.steps() == [1, 3]


FULL_DISK = """
import resource, signal, sys, time
import numpy as np
from maxlib.checkpoint import Checkpointer, SaveError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big, small = {"params": {"w": np.random.default_rng(0).normal(size=100_000)}}, {"params": {"w": np.zeros(10)}}
with Checkpointer(sys.argv[1]) as ck:
    ck.save(1, big)
    ck.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    ck.save(2, big)
    try:
        ck.save(3, small)
    except SaveError as error:
        print(error.step, str(error))
    ck.wait()
    print(ck.steps(), [ck.verify(step) for step in ck.steps()])
"""


@pytest.mark.full
def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for the disk: write() fails half-way, with EFBIG in place of ENOSPC."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "run"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    said, steps = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert said.startswith("2 Step 2 could not be saved") and "step 1 is the last good one" in done.stdout
    assert steps == "[1, 3] [[], []]"  # the next save went through, and neither was harmed
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["1", "3"]  # what half a save left is gone


def test_a_failed_save_is_reported_by_wait_and_close(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint._records, "manifest_text", broken)  # in the background
    ck = Checkpointer(tmp_path)
    ck.save(1, ITEMS)
    with pytest.raises(SaveError, match=r"Step 1 could not be saved.*No space left.*there is no earlier one"):
        ck.wait()
    ck.wait()  # once is enough
    ck.save(1, ITEMS)  # it is not there, so it may be tried again
    with pytest.raises(SaveError, match="Step 1"):
        ck.close()
    assert list(tmp_path.iterdir()) == []
