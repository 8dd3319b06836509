"""One process of a run that loses another and goes on without a new start of Python: `python -m
tests.distributed.shrinking PORT PROCESS PROCESSES DIRECTORY`.

A collective whose peer has died raises an error on CPUs. The processes that are left meet in the directory, clear jax's
backend, start it again with fewer processes, and continue from the host's copy of the last step that all of them have.
jax has no public function for this.
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, ROWS = 200, np.arange(6 * 64, dtype=np.float32).reshape(6, 64) / 384  # three and two processes divide the rows
MEETING = 1.0  # seconds for the others to notice
OLD: list[Any] = []  # stays until the end: a client ends its process when its service has stopped


def start(port: int, process: int, processes: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", processes, process, heartbeat_timeout_seconds=10)


def stop() -> None:
    """Gives up the processes and all devices; a clean shutdown would wait for the process that is gone."""
    state = distributed.global_state
    assert state.preemption_sync_manager is not None
    state.preemption_sync_manager.shutdown()
    OLD.append((state.client, state.service))
    state.preemption_sync_manager = state.client = state.service = None
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    gc.collect()


def train(saved: dict[int, np.ndarray]) -> None:
    """Trains to the end, and keeps the last two steps on the host."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = jax.make_array_from_callback(ROWS.shape, NamedSharding(mesh, P("data")), lambda index: ROWS[index])
    step = jax.jit(lambda w, x: 0.99 * w + 0.01 * x.mean(0), out_shardings=NamedSharding(mesh, P()))
    while (at := max(saved)) < STEPS:
        w = step(jax.device_put(saved[at], NamedSharding(mesh, P())), rows)
        saved[at + 1] = np.asarray(w.addressable_data(0))
        saved.pop(at - 1, None)
        print(f"step {at + 1} of {jax.process_count()}", flush=True)
        time.sleep(0.02)


def meet(directory: Path, process: int, step: int) -> tuple[list[int], int]:
    """Returns the processes that are left, and the last step that all of them have."""
    (directory / f"left-{process}").write_text(str(step))
    time.sleep(MEETING)
    steps = {int(file.name.removeprefix("left-")): int(file.read_text()) for file in directory.glob("left-*")}
    return sorted(steps), min(steps.values())


def main(port: int, process: int, processes: int, directory: Path) -> None:
    jax.config.update("jax_enable_recoverability", True)
    saved = {0: np.zeros(64, np.float32)}
    start(port, process, processes)
    try:
        train(saved)
    except Exception as error:  # its frames hold arrays, and these the old backend: go on outside of this block
        print(f"lost one: {type(error).__name__}", flush=True)
    if max(saved) < STEPS:
        begin = time.monotonic()
        left, common = meet(directory, process, max(saved))
        stop()
        start(port + 1, left.index(process), len(left))
        print(f"again after {time.monotonic() - begin - MEETING:.2f} s", flush=True)
        saved = {common: saved[common]}
        train(saved)
    print("end", saved[STEPS].sum(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)
