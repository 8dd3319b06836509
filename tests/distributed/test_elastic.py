"""examples/launch/elastic.py: a replica that is killed is left out, and joins again."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxlib import data, tokenization
from tests.distributed import shrinking

ROOT = Path(__file__).parents[2]


def start(directory: Path, port: int, process: int) -> subprocess.Popen:
    options = f"gpt3-52k --tokens {directory}/tokens --shared {directory}/shared --length 32 --batch-size 2"
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": str(process),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, ROOT / "examples/launch/elastic.py", *options.split(), "--meetings=100000", "--every=3", "--heartbeat=10"],
        env=os.environ | variables,
        stdout=(directory / f"{process}.txt").open("a"),
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def wait_for(text: str, file: Path, after: int = 0) -> int:
    """Waits until a text is printed; returns where it ends."""
    end = time.monotonic() + 240
    while (at := file.read_text().find(text, after)) < 0:
        assert time.monotonic() < end, (text, file.read_text()[-2000:])
        time.sleep(0.1)
    return at + len(text)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_lost_replica_is_left_out_and_joins_again(tmp_path):
    documents = data.in_memory([f"{i} cats sat on {i} mats" for i in range(60)])
    tokenizer = tokenization.train_bpe((document["text"] for document in documents), vocab_size=300)
    data.write_tokens(documents, tmp_path / "tokens", tokenizer)
    port = free_port()
    running = [start(tmp_path, port, process) for process in range(3)]
    log = tmp_path / "0.txt"
    try:
        wait_for("of replicas [0, 1, 2]: loss", log)
        running[2].kill()
        begin = time.monotonic()
        at = wait_for("lost replicas [2]", log)
        at = wait_for("of replicas [0, 1]: loss", log, at)
        print(f"the others went on after {time.monotonic() - begin:.1f} s")
        running.append(start(tmp_path, port, 2))
        at = wait_for("of replicas [0, 1, 2]: loss", log, at)
        joined = (tmp_path / "2.txt").read_text()
        assert "joined" in joined
        losses = [float(line.split()[-1]) for line in log.read_text().splitlines() if "loss" in line]
        assert losses[-1] < losses[0] and running[0].poll() is None is running[1].poll()
    finally:
        for process in running:
            process.kill()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_processes_go_on_without_one_and_without_a_new_start(tmp_path):
    port = str(free_port())
    logs = [tmp_path / f"{process}.txt" for process in range(3)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.shrinking", port, str(process), "3", tmp_path],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for process, log in enumerate(logs)
    ]
    try:
        wait_for("step 50 of 3", logs[0])
        running[1].kill()
        assert [running[process].wait(120) for process in (0, 2)] == [0, 0], logs[0].read_text()[-2000:]
    finally:
        for process in running:
            process.kill()
    for log in (logs[0], logs[2]):
        said = log.read_text()
        print(next(line for line in said.splitlines() if line.startswith("again")))
        wanted = (1 - 0.99**shrinking.STEPS) * shrinking.ROWS.mean(0).sum(dtype=float)
        assert float(said.split()[-1]) == pytest.approx(wanted, rel=1e-5) and "of 2" in said
