"""Two hosts write one checkpoint; any number of hosts reads it, and replicated arrays are read once."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxlib import checkpoint
from maxlib.checkpoint import Checkpointer
from tests.training import hosts

ROOT = Path(__file__).parents[2]


def start(directory: Path, what: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.training.hosts", port]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join([*flags, "--xla_force_host_platform_device_count=2"])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    return [subprocess.Popen([*command, host, directory, what], **pipes) for host in "01"]


def both(directory: Path, what: str) -> list[str]:
    running = start(directory, what)
    try:
        said = [child.communicate(timeout=200) for child in running]
    finally:
        for child in running:
            child.kill()
    assert [child.returncode for child in running] == [0, 0], said[0][1][-3000:] + said[1][1][-3000:]
    return [last_line(out) for out, _ in said]


def last_line(out: str) -> str:
    """Of what was printed: gloo's own lines may come in between, or when the process ends."""
    return next((line for line in reversed(out.splitlines()) if not line.startswith("[Gloo]")), "")


@pytest.mark.full
def test_two_hosts(tmp_path):
    both(tmp_path, "save")
    data = {"0": {"n": "xxx"}, "1": {"n": "xxxxxxxx"}}
    got = checkpoint.load(tmp_path)
    np.testing.assert_array_equal(got["params"]["w"], hosts.VALUES)
    assert (got["meta"]["step"], got["data"]) == (2, data)
    assert both(tmp_path, "restore") == [f"2 {sorted(data.items())}"] * 2

    part = hosts.VALUES[:2].tobytes()  # the first device's
    for file in (f for f in (tmp_path / "2" / "params").rglob("*") if f.is_file() and part in f.read_bytes()):
        file.write_bytes(file.read_bytes().replace(part, hosts.VALUES[2:4].tobytes()))
    assert both(tmp_path, "restore") == [f"1 {sorted(data.items())}"] * 2  # both see it and take the step before


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", [False, True], ids=["whole", "damaged"])
def test_what_hosts_share_is_read_by_one_and_sent_to_the_others(tmp_path, damage):
    counts = [dict.fromkeys([*hosts.COPIES, "own"], 1), {"own": 1}]
    assert both(tmp_path, "copies") == [f"2 {dict(sorted(count.items()))}" for count in counts]
    if not damage:
        return
    shutil.rmtree(tmp_path / "9")
    for file in (f for f in (tmp_path / "2" / "params").rglob("*") if f.is_file() and f.stat().st_size > 1000):
        file.write_bytes(file.read_bytes()[:900])  # only the host that reads can see it
    assert [line.split()[0] for line in both(tmp_path, "copies")] == ["1", "1"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_one_host_cannot_read_or_write_concerns_all(tmp_path):
    assert both(tmp_path, "faults") == ["1 True [1, 3] True"] * 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_error_of_one_host_is_seen_though_the_others_do_not_have_it(tmp_path):
    first, second = start(tmp_path, "raises")
    try:
        assert last_line(second.communicate(timeout=200)[0]) == "of this host alone"
    finally:
        first.kill()  # it would end by itself, when the other one is missed
        first.communicate()
    assert Checkpointer(tmp_path).latest() == 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_export_that_one_host_cannot_write_stops_none(tmp_path):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "precious.txt").touch()
    assert both(tmp_path, "export") == ["5", "5"]
    assert [path.name for path in (tmp_path / "2").iterdir()] == ["precious.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sigterm_for_one_host_stops_all_after_the_same_step(tmp_path):
    first, other = both(tmp_path, "sigterm")
    code, step, steps = first.split(maxsplit=2)
    assert first == other and code == "143" and steps == f"[{step}]" and int(step) >= 3


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_directory_that_was_taken_over_is_refused_on_every_host(tmp_path):
    assert both(tmp_path, "in_use") == ["refused", "refused"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_save_that_fails_on_one_host_is_known_to_the_others_within_a_minute(tmp_path):
    assert both(tmp_path, "late") == ["True True [1, 3]"] * 2
