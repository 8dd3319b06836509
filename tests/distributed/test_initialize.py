"""Process discovery, and detection of processes that do not start."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

from maxlib.distributed import _initialize as distributed
from maxlib.distributed._initialize import rendezvous

JOB_SET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "worker", "JOB_COMPLETION_INDEX": "3", "NNODES": "4"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[05-06]", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OLD_URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
JAX = {"JAX_COORDINATOR_ADDRESS": "head:99", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}

CASES = {
    "addresses": (JAX, ("head:99", 3, 2, None)),
    "addresses in a JobSet": (
        JOB_SET | {"JAX_COORDINATOR_ADDRESS": "a-0-0.a"},
        (f"a-0-0.a:{distributed.PORT}", 4, 3, None),
    ),
    "JobSet": (JOB_SET, (f"run-worker-0-0.run:{distributed.PORT}", 4, 3, None)),
    "second job of a JobSet": (
        JOB_SET | {"JOB_INDEX": "1", "JOBSET_REPLICAS": "2"},
        (f"run-worker-0-0.run:{distributed.PORT}", 8, 7, None),
    ),
    "SLURM, a task for each GPU": (SLURM, ("node05:61447", 4, 1, (1,))),
    "SLURM, a task for each node": (
        SLURM | {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
        ("node05:61447", 2, 1, (0, 1)),
    ),
    "Open MPI 4": (OPEN_MPI | OLD_URI, ("10.96.0.1:64942", 4, 2, (0,))),
    "nothing": ({}, None),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JOB", "JAX_COORD", "JAX_NUM_PROC", "JAX_PROCESS", "KUBERNETES_")):
            monkeypatch.delenv(name)
    for name in ("NNODES", "NODE_RANK", "REPLICATED_JOB_NAME", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", CASES)
def test_found_in_the_environment(case, monkeypatch):
    env, want = CASES[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    cluster = distributed.find()
    got = cluster and (cluster.coordinator, cluster.num_processes, cluster.process_id, cluster.local_device_ids)
    if got and got[0].startswith("10.96.0.1:"):  # the port is jax's choice
        got, want = (got[1:], want[1:])
    assert got == want


def test_arguments_come_first_and_must_be_complete(monkeypatch):
    for name, value in JAX.items():
        monkeypatch.setenv(name, value)
    assert distributed.find("here:1", 2, 0).coordinator == "here:1"
    with pytest.raises(ValueError, match="needed together; got 'here:1', None and None"):
        distributed.find("here:1")
    with pytest.raises(ValueError, match="process 2 of 2"):
        distributed.find("here:1", 2, 2)
    monkeypatch.delenv("JAX_PROCESS_ID")
    with pytest.raises(ValueError, match="addresses in the environment"):
        distributed.find()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_NUM_PROCESSES": ""}, "found JAX_COORDINATOR_ADDRESS='head:99' JAX_PROCESS_ID='2'; set"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' JAX_PROCESS_ID='2'; set"),
        ({"JAX_PROCESS_ID": "two"}, "JAX_NUM_PROCESSES='3' JAX_PROCESS_ID='two'; set"),
        ({"JAX_COORDINATOR_ADDRESS": ""}, "found JAX_NUM_PROCESSES='3' JAX_PROCESS_ID='2'; set"),
        ({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""}, "found JAX_COORDINATOR_ADDRESS='head:99'; set"),
    ],
)
def test_incomplete_addresses_are_no_single_process(change, message, monkeypatch):
    """Each of the processes would write the same run; a cluster that knows what is missing is another matter."""
    for name, value in (JAX | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        distributed.find()
    monkeypatch.delenv("JAX_PROCESS_ID")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "")
    for name, value in (OPEN_MPI | OLD_URI).items():
        monkeypatch.setenv(name, value)
    cluster = distributed.find()
    assert cluster is not None and (cluster.num_processes, cluster.process_id) == (4, 2)


@pytest.mark.parametrize("address", ["here", "[::1]", "[::1]:99", "here:99"])
def test_a_coordinator_has_a_port_or_gets_one(address):
    cluster = distributed.find(address, 2, 1)
    assert cluster is not None and cluster.coordinator == (
        address if address.endswith(":99") else f"{address}:{distributed.PORT}"
    )


@pytest.mark.parametrize("address", ["127.0.0.1:bad", "here:", "here:65536", ":99"])
def test_a_port_that_is_none_is_named(address):
    host, port = address.split(":")
    with pytest.raises(ValueError, match=f"arguments: .* got {address!r}, which is host {host!r} and port {port!r}"):
        distributed.find(address, 2, 1)


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def call(address, count, numbers, timeout):
    """Returns each process's result of the roll call: None or its error."""

    def outcome(number):
        try:
            rendezvous(address, count, number, timeout=timeout)
        except TimeoutError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(outcome, numbers))


def test_roll_call_lets_everybody_go():
    assert call(port(), 5, range(5), timeout=20) == [None] * 5


def test_roll_call_names_who_is_missing():
    address = port()
    first, second = call(address, 4, [0, 2], timeout=0.3)
    assert f"processes 1, 3 of 4 did not connect to {address} within 0.3 s" in first
    assert "process 2 connected" in second and second.endswith(": processes 1, 3")


def test_roll_call_turns_wrong_numbers_away():
    """A process of a larger run, and one whose number is taken; those that belong together still find each other."""
    address = port()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        run = lambda number, count: pool.submit(rendezvous, address, count, number, timeout=20)
        first, stranger = run(0, 3), run(3, 4)
        assert "process 3 of 4, but this run has 3" in str(stranger.exception())
        twins = [run(1, 3), run(1, 3)]
        (refused,), (accepted,) = concurrent.futures.wait(twins, return_when=concurrent.futures.FIRST_COMPLETED)
        assert "another process 1 has connected" in str(refused.exception())
        assert [each.result() for each in (first, accepted, run(2, 3))] == [None] * 3


def test_roll_call_names_an_absent_coordinator():
    (error,) = call("127.0.0.1:1", 2, [1], timeout=0.3)
    assert "process 1 did not reach process 0 at 127.0.0.1:1 within 0.3 s" in error


def test_a_service_that_runs_already_is_said_or_rejoined():
    """jax's service answers with binary frames: the run goes on, or an earlier one has not ended."""

    def serve(server: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError), server.accept()[0] as caller:
                caller.recv(64)
                caller.sendall(b"\0\0\x12\4\0\xfe\xff")
            if server.fileno() < 0:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="another service answers there"):
            rendezvous(address, 2, 1, timeout=0.3)
        rendezvous(address, 2, 1, timeout=5, rejoins=True)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            OSError, match=f"process 0 cannot listen at {address} .*in use.* an address with another port"
        ):
            rendezvous(address, 2, 0, timeout=1)


RUN = """
import sys, time, jax
from pathlib import Path
from maxlib import distributed, sharding
made = Path(sys.argv[3])
print(distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), timeout=120, exit_on_error=True))
with distributed.main_process_first("a file"):
    before = made.exists()
    time.sleep(0.0 if before else 0.2)
    made.write_text("made")
print("all", len(jax.devices()), before, distributed.allgather_json([jax.process_index(), "ü" * jax.process_index()]))
if jax.process_index() == 1:
    raise OSError("no more data")
distributed.allgather_json(0)
time.sleep(1000)
"""


def test_two_processes_start_meet_and_end_when_one_fails(tmp_path):
    """Without help they would wait for each other for five minutes: one in a collective, one at its exit."""
    address = port()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = lambda number: subprocess.Popen(
        [sys.executable, "-c", RUN, address, str(number), str(tmp_path / "made")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for number, process in enumerate([run(0), run(1)]):
        out, error = process.communicate(timeout=200)
        assert process.returncode == 1 and "arguments: process" in out, error
        assert f"all 2 {number == 1} [[0, ''], [1, 'ü']]" in out
        assert ("no more data" if number else "Connection ") in error
