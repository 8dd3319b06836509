"""One process of a small run whose checkpoints are near it: `python -m tests.checkpoint.local_hosts PORT PROCESS
PROCESSES DIRECTORY`. It prints where it starts, each step, and at the end a checksum of its state.
"""

import faulthandler
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.checkpoint import Checkpointer, Local, Tiers, checksums

STEPS, EVERY = 60, 5


@jax.jit
def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    key = jax.random.fold_in(jax.random.key(0), state["count"])
    w = jnp.sin(state["w"] * 1.7 + jax.random.normal(key, state["w"].shape))
    return {"w": w, "mean": 0.9 * state["mean"] + w.mean(0), "count": state["count"] + 1}


def main(port: str, process: int, processes: int, directory: Path) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=process)
    mesh = jax.make_mesh((processes,), ("data",), axis_types=(AxisType.Auto,))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in (("w", P("data")), ("mean", P()), ("count", P()))}
    first = {"w": jnp.ones((8, 256)), "mean": jnp.zeros(256), "count": jnp.int32(0)}
    state = {name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__) for name, x in first.items()}
    near = Local(directory / f"disk-{process}", every=EVERY)
    with Tiers(near, Checkpointer(directory / "shared", every=25)) as tiers:
        step = 0
        if tiers.latest() is not None:
            restored = tiers.restore(like={"params": state})
            state, step = restored["params"], restored["meta"]["step"]
        print(f"from {step} {near.steps()}", flush=True)
        while step < STEPS:
            state, step = jax.block_until_ready(update(state)), step + 1
            print(f"step {step}", flush=True)
            if tiers.should_save(step):
                tiers.save(step, {"params": state})
            time.sleep(0.05)
    print(f"end {sorted(checksums(state).items())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
