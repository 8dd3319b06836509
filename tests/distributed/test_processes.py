"""Training on several processes equals one process, also after one was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maxlib import checkpoint, observability
from maxlib.distributed._launcher import _free_port
from tests.distributed import run as program

ROOT, STEPS = Path(__file__).parents[2], 6
PATIENCE = 1000  # seconds for what takes 30 on two free cores
QUICK = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
ENVIRONMENT = os.environ | {"XLA_FLAGS": QUICK, "PYTHONPATH": str(ROOT)}
PROGRAM = [sys.executable, "-m", "tests.distributed.run"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    directory = tmp_path_factory.mktemp("alone")
    program.run(directory, STEPS)
    return directory


def start(count: int, *arguments, **more: str) -> list[subprocess.Popen]:
    addresses = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "JAX_NUM_PROCESSES": str(count)}
    command = [*PROGRAM, *map(str, arguments)]
    environment = lambda i: ENVIRONMENT | more | addresses | {"JAX_PROCESS_ID": str(i)}
    return [
        subprocess.Popen(command, env=environment(i), cwd=ROOT, stderr=subprocess.PIPE, text=True) for i in range(count)
    ]


def launched(directory: Path, processes: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxlib.distributed", "launch", "--directory", directory, "--grace", "2"]
    command += ["--retries", "0", "--processes", processes, "--", *PROGRAM, directory, *arguments]
    return subprocess.Popen([*map(str, command)], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def rows(directory: Path) -> dict[tuple[int, int], list]:
    """The tokens of each row of each global batch; where several processes read one, they must agree."""
    by_step: dict[tuple[int, int], list] = {}
    for path in directory.glob("rows-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            content = [line["tokens"], line["segments"]]
            assert by_step.setdefault((line["batch"], line["row"]), content) == content
    return by_step


def trajectory(directory: Path) -> tuple[list[tuple[int, str]], list[float]]:
    names = ("loss", "grad_norm", "num_targets", "eval/loss", "eval/num_targets")
    lines = observability.read_jsonl(directory / "metrics.jsonl")
    values = {(line["step"], name): line[name] for line in lines for name in names if name in line}
    return sorted(values), [values[key] for key in sorted(values)]


def assert_same_run(directory: Path, want: Path, rtol: float = 1e-6) -> None:
    got, wanted = rows(directory), rows(want)
    trained = {key: row for key, row in wanted.items() if key[0] <= STEPS}  # what was read ahead is another matter
    assert {key: row for key, row in got.items() if key[0] <= STEPS} == trained and len(trained) == STEPS * program.ROWS
    assert trajectory(directory)[0] == trajectory(want)[0]
    np.testing.assert_allclose(trajectory(directory)[1], trajectory(want)[1], rtol=rtol)
    states = [checkpoint.load(path / "checkpoints", items=["params", "opt"]) for path in (directory, want)]
    for item in ("params", "opt"):
        ours, theirs = (state[item] for state in states)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)
    counts = [
        [line for line in observability.read_jsonl(p / "metrics.jsonl") if "data/tokens/web" in line]
        for p in (directory, want)
    ]
    assert counts[0][-1]["data/tokens/web"] == counts[1][-1]["data/tokens/web"] > 0


@pytest.mark.full
@pytest.mark.timeout(1200)  # a machine with other work gives three processes little
def test_two_processes_one_killed_then_one_goes_on(alone, tmp_path):
    first, second = start(2, tmp_path, STEPS, 5, 1)
    try:
        second.communicate(timeout=PATIENCE)
    finally:
        first.kill()  # it would end by itself, later: see below
        first.communicate()
    assert second.returncode == -signal.SIGKILL
    assert checkpoint.Checkpointer(tmp_path / "checkpoints").latest() in (2, 4)
    assert {step for step, _ in rows(tmp_path)} >= {1, 2, 3, 4, 5}
    program.run(tmp_path, STEPS)
    assert_same_run(tmp_path, alone)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_four_processes_then_two_under_a_launcher(alone, tmp_path):
    run = launched(tmp_path, "4,2", STEPS, 5, 2)
    out, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, out
    assert "process 2 was killed by SIGKILL after step" in out and "process 2 ended with 7" in out
    notes = [json.loads(line) for line in (tmp_path / "launch.jsonl").read_text().splitlines()]
    assert [note["processes"] for note in notes if note["event"] == "start"] == [4, 4, 2]
    assert_same_run(tmp_path, alone)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("stage=2", "pp:4"), ("tensor=2", "tp"), ("context=2", "cp_ring"), ("context=2", "cp_gather")],
)
def test_processes_that_share_rows_train_as_one_does(alone, tmp_path, mesh, strategy):
    """Each of two processes holds a stage, a part of every matrix, or half of every row's tokens."""
    processes = start(2, tmp_path, STEPS, MESH=mesh, STRATEGY=strategy)
    said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert_same_run(tmp_path, alone, rtol=1e-5)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_diagnostics_and_samples_of_several_processes(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    for directory, count in ((together, 2), (alone, 1)):
        processes = start(count, directory, 3, WATCHED="1")
        said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * count, said
    ours, theirs = (observability.read_jsonl(path / "metrics.jsonl") for path in (together, alone))
    (ours,), (theirs,) = ([line for line in lines if "layers/output_rms" in line] for lines in (ours, theirs))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, err_msg=name)
    assert (together / "samples.jsonl").read_text() == (alone / "samples.jsonl").read_text()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_request_to_stop_saves_and_more_processes_go_on(alone, tmp_path):
    run = launched(tmp_path, "2", 10_000)
    wait_for_step(tmp_path, 3)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, out
    reached = checkpoint.Checkpointer(tmp_path / "checkpoints").latest()
    assert reached == max(line["step"] for line in observability.read_jsonl(tmp_path / "metrics.jsonl"))
    again = launched(tmp_path, "4", max(reached + 2, STEPS))
    assert again.communicate(timeout=PATIENCE) and again.returncode == 0
    got, wanted = rows(tmp_path), rows(alone)
    assert all(got[key] == row for key, row in wanted.items() if key[0] <= STEPS)
    common = lambda path: [line["loss"] for line in observability.read_jsonl(path / "metrics.jsonl") if "loss" in line][
        :STEPS
    ]
    np.testing.assert_allclose(common(tmp_path), common(alone), rtol=1e-5)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_those_left_end_by_themselves(tmp_path):
    """Without a launcher: whatever the coordinator's or another process's death leaves behind ends within three
    heartbeats.
    """
    for victim in (0, 1):
        processes = start(2, tmp_path / str(victim), STEPS, 3, victim)
        assert processes[victim].wait(timeout=PATIENCE) == -signal.SIGKILL
        died = time.monotonic()
        _, said = processes[1 - victim].communicate(timeout=PATIENCE)
        assert processes[1 - victim].returncode != 0, said
        assert time.monotonic() - died < 60


def wait_for_step(directory: Path, step: int, patience: float = PATIENCE) -> None:
    path, end = directory / "metrics.jsonl", time.monotonic() + patience
    while time.monotonic() < end:
        if path.exists() and any(line["step"] >= step for line in observability.read_jsonl(path)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} did not come to step {step}")
