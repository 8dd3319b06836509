"""The short form of `tests.training.soak`: no resource of the process grows with repetition."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import soak


def test_nothing_grows():
    """60 saves with evaluations, exports and metrics, 20 epochs of a loader, in a process of its own with 256
    descriptors.
    """
    command = [sys.executable, "-m", "tests.training.soak", "short", "loader", "--share", "0"]
    # Not measured for coverage, whose own records grow.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 230}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], **options)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "nothing grows"
    assert '"times": 60' in done.stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", soak.TIMES)
def test_nothing_grows_for_long(part):
    assert soak.failures(soak.run(part, soak.TIMES[part] // 10)) == []


SAMPLE = {"threads": 9.0, "python threads": 3.0, "descriptors": 6.0, "shared_memory": 0.0, "arrays": 5.0, "files": 10.0}
SAMPLE |= {"rss_kib": 1e6, "in_use_kib": 1e5, "python_blocks": 7e5}


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("descriptors", 0, None),
        ("descriptors", 1, "descriptors went from 14 to 45"),
        ("threads", 0.1, "threads grows by 0.100 a repeat, limit 0.02"),
        ("files", 3, "files went from 34 to 127"),
        ("rss_kib", 15, None),
        ("rss_kib", 25, "rss_kib grows by 25.000 a repeat, limit 20.0"),
    ],
)
def test_a_leak_is_found(name, by, said):
    samples = [SAMPLE | {"times": i, name: SAMPLE[name] + by * i} for i in range(40)]
    assert soak.failures(samples) == ([] if said is None else [said])
