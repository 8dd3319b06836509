"""The short form of `tests.training.soak`: no resource of the process grows with repetition."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import soak


@pytest.mark.full
def test_nothing_grows():
    """150 saves with evaluations, exports and metrics, 20 epochs of a loader, in a process of its own with 256
    descriptors.
    """
    command = [sys.executable, "-m", "tests.training.soak", "short", "loader", "--share", "0"]
    # Not measured for coverage, whose own records grow.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 230}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], **options)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "nothing grows"
    assert '"times": 150' in done.stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", soak.TIMES)
def test_nothing_grows_for_long(part):
    assert soak.failures(soak.run(part, soak.TIMES[part] // 10)) == []


COUNTS = {"threads": 9.0, "python threads": 3.0, "descriptors": 6.0, "shared_memory": 0.0, "arrays": 5.0}
MEMORY = {"rss_kib": 1e6, "in_use_kib": 1e5, "python_blocks": 7e5}


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("seconds", 0, None),
        ("descriptors", 1, "descriptors went from 14 to 45"),
        ("python threads", 1, "python threads went from 11 to 42"),
        ("threads", 0.1, "threads grows by 0.100 a repeat, limit 0.02"),
        ("shared_memory", 1, "shared_memory went from 8 to 39"),
        ("arrays", 1, "arrays went from 13 to 44"),
        ("files", 3, "files went from 34 to 127"),
        ("rss_kib", 25, "rss_kib grows by 25.000 a repeat, limit 20.0"),
        ("rss_kib", 15, None),
        ("in_use_kib", 25, "in_use_kib grows by 25.000 a repeat, limit 20.0"),
        ("python_blocks", 100, "python_blocks grows by 100.000 a repeat, limit 60.0"),
    ],
)
def test_a_leak_is_found(name, by, said):
    base = dict.fromkeys(soak.CLOCKS, 1.0) | {"files": 10.0} | COUNTS | MEMORY
    samples = [base | {"times": i, name: base[name] + by * i} for i in range(40)]
    assert soak.failures(samples) == ([] if said is None else [said])


@pytest.mark.parametrize(("ratio", "said"), [(1.04, []), (1.06, ["a repeat takes 1.060 times"])])
def test_a_process_that_slows_down_is_found(ratio, said):
    base = {"seconds": 1.0, "files": 10.0, "cpu_seconds": 2.0} | COUNTS | MEMORY
    samples = [base | {"times": 50 * i} | ({"beside": 2.0 / ratio} if i > 35 else {}) for i in range(41)]
    assert [text[: len(said[0])] for text in soak.failures(samples)] == said


@pytest.mark.full
def test_two_processes_take_turns(monkeypatch):
    monkeypatch.setattr(soak, "LONG", 30)
    monkeypatch.setattr(soak, "WARM_UP", 5)
    samples = soak.run("loader", 30, samples=15)
    assert [i for i, s in enumerate(samples, 1) if "beside" in s] == [10, 11, 12, 13, 14, 15]
    assert all(s["beside"] > 0 for s in samples[9:]) and 0.1 < soak.slower(samples) < 10
