"""One of two hosts, each with two devices: `python -m tests.training.hosts PORT HOST DIRECTORY save|restore`."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.training.checkpoint import Checkpointer

VALUES = np.random.default_rng(0).normal(size=(8, 600)).astype(np.float32)


def main(port: str, host: int, directory: str, what: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=host)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("data") if what == "save" else P())
    w = jax.make_array_from_callback(VALUES.shape, place, lambda index: VALUES[index])
    with Checkpointer(directory) as ck:
        if what == "save":
            for step in (1, 2):
                ck.save(step, {"params": {"w": w}}, data={str(host): {"n": "x" * (3 + 5 * host)}})
        elif what == "restore":
            got = ck.restore(like={"params": {"w": w}})
            for shard in got["params"]["w"].addressable_shards:
                np.testing.assert_array_equal(shard.data, VALUES[shard.index])
            print(got["meta"]["step"], sorted(got["data"].items()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
