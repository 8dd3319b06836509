"""Two hosts write one checkpoint; any number reads it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxlib.training import checkpoint
from tests.training import hosts

ROOT = Path(__file__).parents[2]


def both(directory: Path, what: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.training.hosts", port]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    running = [subprocess.Popen([*command, host, directory, what], **pipes) for host in "01"]
    said = [child.communicate(timeout=200) for child in running]
    assert [child.returncode for child in running] == [0, 0], said
    return [(out.splitlines() or [""])[-1] for out, _ in said]


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
