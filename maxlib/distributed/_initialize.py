"""Starts `jax.distributed` from arguments or from the cluster's environment variables, once every process of a run has
started, and reports those that have not.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

PORT = 8476
EXIT_ON_ERROR = "MAXLIB_EXIT_ON_ERROR"  # the launcher sets it to "1" for the processes that it starts
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_COUNT, _OWN = ("JAX_NUM_PROCESSES", "NNODES"), ("JAX_PROCESS_ID", "NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Processes of a run: how they were found, process 0's address, their number, and this process's number."""

    source: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.source}: process {self.process_id} of {self.num_processes}, coordinator {self.coordinator}"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = 300,
    heartbeat: float = 100,
    exit_on_error: bool | None = None,
) -> Cluster | None:
    """Joins the processes of a run, and prints what it found; call it before anything that touches devices.

    Looks for, in this order: the arguments; `JAX_COORDINATOR_ADDRESS` with `JAX_NUM_PROCESSES` (or `NNODES`) and
    `JAX_PROCESS_ID` (or `NODE_RANK`); a Kubernetes JobSet; whatever jax finds itself (SLURM, Open MPI 4, TPU pods).

    Args:
        coordinator: Address of process 0, `host` or `host:port`; pass it together with the next two arguments, or none
            of them.
        num_processes: Number of processes of the run.
        process_id: Index of this process, from 0.
        local_device_ids: Devices of this process; None leaves the choice to the cluster and to jax.
        timeout: Seconds within which all processes must connect.
        heartbeat: Seconds without a heartbeat after which a process counts as dead, which ends all others.
        exit_on_error: True ends a process at once, by `sys.excepthook`, when an exception ends its program. Without it
            jax's shutdown barrier holds such a process for up to five minutes, while its peers wait for it. None is
            True under `python -m maxlib.distributed launch`, else False.

    Returns:
        The cluster that was found; None for a single process.

    Raises:
        ValueError: when an address or a number is missing, or they are inconsistent.
        OSError: when the port of process 0 is in use.
        TimeoutError: when a process did not connect in time; the message names it.
    """
    cluster = find(coordinator, num_processes, process_id, timeout=timeout)
    if cluster is None:
        print("maxlib: a single process (no addresses, JobSet, SLURM, Open MPI or TPU pod in the environment)")
        return None
    print(f"maxlib: {cluster}", flush=True)
    begin = time.monotonic()
    # jax aborts when a process is late, and does not say which one.
    rejoins = getattr(jax.config, "jax_enable_recoverability", False)
    rendezvous(cluster.coordinator, cluster.num_processes, cluster.process_id, timeout=timeout, rejoins=rejoins)
    ids = cluster.local_device_ids if local_device_ids is None else local_device_ids
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=None if ids is None else list(ids),
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, int(timeout - (time.monotonic() - begin))),
        heartbeat_timeout_seconds=int(heartbeat),
    )
    if exit_on_error or (exit_on_error is None and os.environ.get(EXIT_ON_ERROR) == "1"):
        _exit_on_error()
    return cluster


def _exit_on_error() -> None:
    """Ends the process right after the traceback of an uncaught exception."""
    before = sys.excepthook

    def hook(*error: Any) -> None:
        before(*error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = hook


def find(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300,
) -> Cluster | None:
    """Finds what `initialize` would use, without starting anything."""
    arguments = (coordinator, num_processes, process_id)
    if any(value is not None for value in arguments):
        return _complete("arguments", *arguments)
    env = os.environ
    cluster = _addresses(env) or _job_set(env) or _one_task_a_node(env) or _known_to_jax(timeout)
    if cluster is None and any(env.get(name) for name in _ADDRESSES):
        raise _incomplete(env)  # otherwise each process would start the same run on its own
    return cluster


def _complete(source: str, coordinator: str | None, num_processes: int | None, process_id: int | None) -> Cluster:
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"{source}: coordinator address, number of processes and this process's index are needed together; got "
            f"{coordinator!r}, {num_processes!r} and {process_id!r}"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(f"{source}: process {process_id} of {num_processes}; processes count from 0")
    return Cluster(source, _with_port(source, coordinator), num_processes, process_id)


def _with_port(source: str, coordinator: str) -> str:
    if coordinator and (":" not in coordinator or coordinator.endswith("]")):
        return f"{coordinator}:{PORT}"
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{source}: the coordinator's address must be a host, or host:port with a port from 1 to 65535; got {coordinator!r}, "
            f"which is host {host!r} and port {port!r}"
        )
    return coordinator


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """Reads the first of these variables that is set; None if it is not a number."""
    value = next((env[name] for name in names if env.get(name)), "")
    return int(value) if value.isdecimal() else None


def _addresses(env: Mapping[str, str]) -> Cluster | None:
    address, count, index = _address(env), _number(env, *_COUNT), _number(env, *_OWN)
    if address is None or count is None:
        return None  # an address alone only overrides the address of another cluster
    if index is None:
        raise _incomplete(env)
    return _complete("addresses in the environment", address, count, index)


def _incomplete(env: Mapping[str, str]) -> ValueError:
    variables = " ".join(
        f"{name}={env[name]!r}" for name in ("JAX_COORDINATOR_ADDRESS", *_COUNT, *_OWN) if env.get(name)
    )
    return ValueError(
        f"addresses in the environment: found {variables}; set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES (or "
        "NNODES) and JAX_PROCESS_ID (or NODE_RANK) to 0, 1, ... for every process, or none of them for a single one"
    )


def _address(env: Mapping[str, str]) -> str | None:
    address, port = env.get("JAX_COORDINATOR_ADDRESS") or None, env.get("JAX_COORDINATOR_PORT")
    return f"{address}:{port}" if address and port and ":" not in address else address


def _job_set(env: Mapping[str, str]) -> Cluster | None:
    """Derives the cluster from the names of a JobSet's pods, without asking the Kubernetes API (TPU pods know more by
    themselves).
    """
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX")
    pods, jobs = _number(env, "JAX_PROCESSES_PER_JOB", "NNODES"), _number(env, "JOBSET_REPLICAS") or 1
    if not all(name in env for name in names) or pods is None or "TPU_WORKER_HOSTNAMES" in env:
        return None
    job_set, replicated, index = (env[name] for name in names)
    port = env.get("JAX_COORDINATOR_PORT") or PORT
    process = (_number(env, "JOB_INDEX") or 0) * pods + int(index)
    address = _address(env) or f"{job_set}-{replicated}-0-0.{job_set}:{port}"
    return _complete(f"JobSet {job_set}", address, pods * jobs, process)


def _one_task_a_node(env: Mapping[str, str]) -> Cluster | None:
    """Finds SLURM with one task per node, which owns all of the node's GPUs; jax would only give it one."""
    gpus = _number(env, "SLURM_GPUS_ON_NODE")
    if gpus is None or not env.get("SLURM_NTASKS") or env["SLURM_NTASKS"] != env.get("SLURM_STEP_NUM_NODES"):
        return None
    cluster = _known_to_jax(timeout=0)
    return cluster and dataclasses.replace(cluster, local_device_ids=tuple(range(gpus)))


def _known_to_jax(timeout: float) -> Cluster | None:
    from jax._src.clusters.cluster import ClusterEnv  # not public, but its result is needed before jax starts

    engine = next((e for e in ClusterEnv._cluster_types if not e.opt_in_only_method and e.is_env_present()), None)
    if engine is None:
        return None
    address, count, index, ids = ClusterEnv.auto_detect_unset_distributed_params(
        _address(os.environ), None, None, None, engine.name or None, int(timeout)
    )
    names = {"slurm": "SLURM", "ompi": "Open MPI", "gketpu": "TPU pod (GKE)", "gcetpu": "TPU pod", "": "Kubernetes"}
    cluster = _complete(names.get(engine.name) or engine.__name__, address, count, index)
    return dataclasses.replace(cluster, local_device_ids=None if ids is None else tuple(ids))


_HELLO = "maxlib roll call"
_WRONG = "wrong: "


def rendezvous(address: str, num_processes: int, process_id: int, *, timeout: float, rejoins: bool = False) -> None:
    """Waits until all processes of a run have started; process 0 listens at `address`, and frees it afterwards.

    Args:
        address: `host:port` of process 0.
        num_processes: Number of processes.
        process_id: Index of this process.
        timeout: Seconds to wait.
        rejoins: True if this process may come back to a run that goes on: if jax's service already answers at the
            address, nothing is waited for.

    Raises:
        TimeoutError: in every process that connected, with the indices of those that did not.
        ValueError: in a process whose index another process has, or that was started for a different number of
            processes.
        OSError: when process 0 cannot open the port.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _host(address, int(port), num_processes, deadline, timeout)
    else:
        _join(host.strip("[]"), int(port), address, process_id, num_processes, deadline, timeout, rejoins)


def _host(address: str, port: int, num_processes: int, deadline: float, timeout: float) -> None:
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(address, port))
        while len(came) < num_processes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                _receive(stack.enter_context(server.accept()[0]), came, num_processes)
        missing = set(range(1, num_processes)) - set(came)
        for caller in came.values():
            _answer(caller, _words(missing) or "go")
        if missing:
            raise TimeoutError(_late(missing, num_processes, address, timeout))


def _listen(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=1024, reuse_port=False)
    except OSError as error:
        raise OSError(
            error.errno,
            f"process 0 cannot listen at {address} ({error.strerror}): end the process that uses port {port}, perhaps "
            "one "
            "of an earlier run, or give all processes an address with another port",
        ) from error


def _receive(caller: socket.socket, came: dict[int, socket.socket], num_processes: int) -> None:
    """Registers a caller, or replies with an error."""
    number, count = _greeting(caller)
    if number is None:
        return
    if count != num_processes or not 0 < number < num_processes:
        _answer(caller, f"{_WRONG}process {number} of {count}, but this run has {num_processes}")
        return
    if number in came:  # it may have been restarted: the last one counts
        _answer(came[number], f"{_WRONG}another process {number} has connected: each process needs its own index")
    came[number] = caller


def _answer(caller: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        caller.sendall(text.encode())


def _greeting(caller: socket.socket) -> tuple[int | None, int]:
    """Reads a caller's index and its number of processes; no index if the caller is not a process of this protocol."""
    caller.settimeout(5)
    try:
        words = caller.recv(64).decode(errors="replace")
    except OSError:
        return None, 0
    match = re.fullmatch(rf"{_HELLO} (\d+) of (\d+)", words)
    return (int(match[1]), int(match[2])) if match else (None, 0)


def _join(
    host: str,
    port: int,
    address: str,
    process_id: int,
    num_processes: int,
    deadline: float,
    timeout: float,
    rejoins: bool,
) -> None:
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic())) as line:
                line.sendall(f"{_HELLO} {process_id} of {num_processes}".encode())
                line.settimeout(max(0.01, deadline + 5 - time.monotonic()))  # process 0 replies at its own deadline
                answer = line.recv(4096).decode(errors="replace")
        except OSError as error:
            reason, answer = str(error), ""
        if "\0" in answer:  # frames of gRPC: the run has started, or an earlier one has not ended
            if rejoins:
                return
            reason, answer = "another service answers there", ""
        if answer == "go":
            return
        if answer.startswith(_WRONG):
            raise ValueError(f"process {process_id} was rejected at {address}: {answer.removeprefix(_WRONG)}")
        if answer:
            raise TimeoutError(
                f"process {process_id} connected to {address}, but these did not within {timeout:g} s: {answer}"
            )
        time.sleep(0.1)
    raise TimeoutError(
        f"process {process_id} did not reach process 0 at {address} within {timeout:g} s ({reason}): is it running, is the "
        "address right, is its port reachable?"
    )


def _late(missing: Iterable[int], num_processes: int, address: str, timeout: float) -> str:
    return (
        f"{_words(missing)} of {num_processes} did not connect to {address} within {timeout:g} s: look into their "
        "logs, and check that they were started with this address and this number of processes"
    )


def _words(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    shown = ", ".join(map(str, listed[:20])) + (f" … ({len(listed)} in all)" if len(listed) > 20 else "")
    return f"process{'es' if len(listed) > 1 else ''} {shown}" if listed else ""
