"""Starts `jax.distributed` from arguments or from the cluster's environment variables."""

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxlib.distributed._rendezvous import rendezvous

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
