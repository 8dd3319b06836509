"""The launcher, tested with programs that do not import jax."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxlib.distributed.__main__ import main
from maxlib.distributed._launcher import LockedError, furthest, launch

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
count, index = int(os.environ.get("JAX_NUM_PROCESSES", 1)), int(os.environ.get("JAX_PROCESS_ID", 0))
def step(n):
    with (here / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": n, "loss": 1.0}) + "\\n")
"""


def program(directory: Path, body: str) -> list[str]:
    return [sys.executable, "-SE", "-c", HEAD + body, str(directory)]


def starts(directory: Path) -> list[int]:
    notes = [json.loads(line) for line in (directory / "launch.jsonl").read_text().splitlines()]
    return [note["processes"] for note in notes if note["event"] == "start"]


def test_processes_find_each_other_and_all_must_end_well(tmp_path):
    body = "(here / f'{index}.json').write_text(json.dumps([os.environ['JAX_COORDINATOR_ADDRESS'], count]))"
    assert launch(program(tmp_path, body), tmp_path, processes=[3]) == 0
    reports = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    assert reports[0] == reports[1] == reports[2] and reports[0][0].startswith("127.0.0.1:") and reports[0][1] == 3
    assert starts(tmp_path) == [3]


def test_fewer_start_when_one_does_not_come_back(tmp_path, capfd):
    body = "sys.exit(7 if index == 1 else 0)"
    assert launch(program(tmp_path, body), tmp_path, processes=[2, 1], retries=2) == 0
    assert starts(tmp_path) == [2, 2, 2, 1]
    assert "process 1 ended with 7" in capfd.readouterr().out


def test_a_run_that_comes_forward_is_started_again_and_again(tmp_path):
    """Each start gets one step further, then dies; the fifth has come to the end."""
    body = """
path = here / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
if done == 4: sys.exit(0)
step(done + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(program(tmp_path, body), tmp_path, processes=[1], retries=0) == 0
    assert starts(tmp_path) == [1] * 5 and furthest(tmp_path) == 4


def test_gives_up_with_the_status_of_the_process_that_died(tmp_path, monkeypatch, capfd):
    words = ["maxlib.distributed", "launch", "--directory", str(tmp_path), "--processes", "1", "--"]
    body = "step(5); os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(sys, "argv", [*words, *program(tmp_path, body)])
    assert main() == 137
    assert starts(tmp_path) == [1] * 3  # the first came to step 5, the others no further
    assert "giving up: 2 consecutive starts made no progress beyond step 5" in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words[:-2], "one", "--", "true"])
    assert main() == 2 and "maxlib.distributed: invalid literal for int()" in capfd.readouterr().err


def test_those_that_hang_after_a_death_are_killed(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if index == 0 and count == 2:
    os.fork()  # what a process has started goes with it
    time.sleep(1000)
sys.exit(3 if count == 2 else 0)
"""
    begin = time.monotonic()
    assert launch(program(tmp_path, body), tmp_path, processes=[2, 1], retries=0, grace=0.2) == 0
    assert time.monotonic() - begin < 20
    assert starts(tmp_path) == [2, 1]


def test_a_request_to_stop_reaches_all_and_waits(tmp_path):
    body = """
def stop(number, frame):
    time.sleep(0.2 * index)  # longer than the grace
    (here / f"saved-{index}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(here / f"ready-{index}").touch()
time.sleep(1000)
"""

    def ask():
        while len(list(tmp_path.glob("ready-*"))) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert launch(program(tmp_path, body), tmp_path, processes=[3, 2], grace=0.1) == 143
    assert len(list(tmp_path.glob("saved-*"))) == 3 and starts(tmp_path) == [3]


def test_one_launcher_for_a_directory_and_its_orphans_count(tmp_path):
    body = "(here / 'ready').touch(); time.sleep(1000)"
    words = f"-m maxlib.distributed launch --directory {tmp_path} --processes 1 --"
    command = [sys.executable, *words.split()]
    first = subprocess.Popen([*command, *program(tmp_path, body)], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    with pytest.raises(LockedError, match=f"process number {first.pid} on .*another directory"):
        launch(["true"], tmp_path, processes=[1])
    first.kill()
    first.wait()
    with pytest.raises(LockedError):  # the program still runs
        launch(["true"], tmp_path, processes=[1])
    (pid,) = json.loads((tmp_path / "launch.jsonl").read_text().splitlines()[0])["pids"]
    os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        try:
            assert launch(["true"], tmp_path, processes=[1]) == 0
            return
        except LockedError:
            time.sleep(0.05)
    raise AssertionError("the lock outlived everybody")


def test_gpus_are_dealt_out(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    body = "(here / f'{index}').write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert launch(program(tmp_path, body), tmp_path, processes=[2]) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["4,5", "6,7"]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4,5,6,7 does not divide over 3 processes"):
        launch(["true"], tmp_path, processes=[4, 3])


@pytest.mark.parametrize("processes", [[], [0], [2, 2], [1, 2]])
def test_numbers_must_fall(processes, tmp_path):
    with pytest.raises(ValueError, match="decreasing numbers of at least 1, such as 4,2,1"):
        launch(["true"], tmp_path, processes=processes)


def test_the_last_step_is_read_from_the_end(tmp_path):
    assert furthest(tmp_path) == -1
    lines = [json.dumps({"step": i, "loss": 1.0, "x": "y" * 200}) for i in range(1000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 10')
    assert furthest(tmp_path) == 999
