"""Trains replicas that may die and come back, without a restart of the others. Copy this file and change it.

Start it once for each replica, such as a slice or a node, with the variables of docs/guides/launch.md. Each replica
trains alone on its own devices, and after every `--every` steps all that are alive meet (DiLoCo, arXiv:2311.08105). No
collective crosses replicas, because one that waits for a dead process cannot be stopped: jax says who is alive, and
parameters are exchanged through a directory that all can reach. A replica that was lost is left out from the next
meeting on; started again, it takes over the newest parameters at a meeting. Only the process with the number 0 must not
die: it tells who is alive. The newest meeting is in the directory, so that all can also be started again.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import maxlib
from maxlib import data, distributed, sharding, training, weights


def main() -> None:
    args = arguments()
    jax.config.update("jax_enable_recoverability", True)  # the loss of a process does not end the others
    distributed.initialize(heartbeat=args.heartbeat)
    maxlib.enable_compilation_cache()
    optimizer = training.adamw(args.learning_rate)
    layout = sharding.Layout(sharding.make_mesh(fsdp=-1, devices=jax.local_devices()), sharding.FSDP)
    tokens = data.read_tokens(args.tokens).shuffle(seed=jax.process_index()).repeat()
    rows = lambda part: data.pack(tokens[part], length=args.length)
    loader = data.Loader(rows, batch_size=args.batch_size, num_shards=1)
    training.follow_layout(loader, layout)  # all rows are of this replica
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer))
    with sharding.use(layout):
        state = training.make_state(functools.partial(build, args.preset), optimizer)
        meetings, places = Meetings(args.shared, state.trainable), jax.tree.map(lambda x: x.sharding, state.trainable)
        while meetings.done < args.meetings:
            loss = None
            for _ in range(0 if meetings.joins else args.every):
                state, metrics = step(state, training.shard_batch(next(loader), layout))
                loss = metrics["loss"]
            replicas = meetings.meet(state.trainable)
            state = dataclasses.replace(state, trainable=jax.device_put(meetings.params, places))
            here = "joined" if loss is None else f"loss {float(loss):.4f}"
            print(f"meeting {meetings.done} of replicas {replicas}: {here}", flush=True)
    loader.close()


class Meetings:
    """The outer parameters and their optimizer, alike on all replicas, and the meetings that change them.

    Args:
        directory: A directory that all replicas reach.
        params: The parameters at the beginning, the same on all replicas.
    """

    def __init__(self, directory: Path, params: dict[str, jax.Array]):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.done, self.params = directory, 0, on_host(params)
        self.outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        self.momentum = self.outer.init(self.params)
        self.joins = (directory / "outer.npz").exists()  # the others may be further than this file

    def meet(self, params: dict[str, jax.Array]) -> list[int]:
        """Takes an outer step with the parameters of the replicas that are alive and trained; returns their numbers.

        A replica that joins sends nothing, and takes over what the others have after the step.
        """
        here = jax.process_index()
        sent = {} if self.joins else on_host(params)
        alive = together(lambda _: self.write(f"replica-{here}.npz", sent))
        arrived = {replica: self.read(f"replica-{replica}.npz") for replica in alive}
        trained = {replica: params for replica, params in arrived.items() if params}
        if not self.joins:
            self.step(list(trained.values()))

        def publish(alive: list[int]) -> None:
            if here == min((replica for replica in alive if replica in trained), default=None):
                leaves = {f"momentum.{n}": x for n, x in enumerate(jax.tree.leaves(self.momentum))}
                self.write("outer.npz", {"done": self.done, **leaves, **self.params})

        together(publish)
        if self.joins:
            self.take_over()
        return sorted(trained)

    def step(self, replicas: list[dict[str, np.ndarray]]) -> None:
        """Steps by the mean of how far the replicas went."""
        means = {path: np.mean([params[path] for params in replicas], axis=0) for path in self.params}
        moved = {path: x - means[path] for path, x in self.params.items()}
        updates, momentum = self.outer.update(moved, self.momentum, self.params)
        self.params, self.momentum = on_host(optax.apply_updates(self.params, updates)), on_host(momentum)
        self.done += 1

    def take_over(self) -> None:
        newest = self.read("outer.npz")
        self.params = {path: newest[path] for path in self.params}
        leaves, tree = jax.tree.flatten(self.momentum)
        self.momentum = jax.tree.unflatten(tree, [newest[f"momentum.{n}"] for n in range(len(leaves))])
        self.done, self.joins = int(newest["done"]), False

    def write(self, name: str, arrays: dict[str, Any]) -> None:
        unfinished = self.directory / f"unfinished-{jax.process_index()}.npz"
        np.savez(unfinished, **arrays)
        unfinished.rename(self.directory / name)

    def read(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.directory / name) as arrays:
            return dict(arrays)


def together(run: Callable[[list[int]], None]) -> list[int]:
    """Calls `run(alive)` on all processes that are alive until none dies meanwhile; returns their numbers."""
    while True:
        try:
            with multihost_utils.live_devices(jax.devices()) as devices:
                alive = sorted({device.process_index for device in devices})
                run(alive)
            return alive
        except multihost_utils.ProcessFailureError as error:
            print(f"lost replicas {sorted({device.process_index for device in error.failed_devices})}", flush=True)


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def build(preset: str) -> nnx.Module:
    family = next(family for family in weights.families() if preset in family.presets)
    return family.model(weights.presets()[preset], rngs=nnx.Rngs(0))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("preset", help="a published size, such as llama3.1-8b; `maxlib models` lists them")
    add("--tokens", type=Path, required=True, help="a directory of `python -m maxlib.data tokenize`")
    add("--shared", type=Path, required=True, help="a directory that all replicas reach")
    add("--meetings", type=int, default=100, help="number of meetings (%(default)s)")
    add("--every", type=int, default=50, help="steps of a replica between two meetings (%(default)s)")
    add("--length", type=int, default=1024, help="tokens per row (%(default)s)")
    add("--batch-size", type=int, default=8, help="rows of a replica's step (%(default)s)")
    add("--learning-rate", type=float, default=3e-4, help="learning rate of the replicas (%(default)s)")
    add("--heartbeat", type=float, default=30, help="seconds after which a silent process is lost (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
