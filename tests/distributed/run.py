"""Training run with any number of processes: `python -m tests.distributed.run DIRECTORY STEPS [DIE_AFTER
PROCESS]`.

It trains on a packed mixture, evaluates, saves every two steps, writes down which tokens were in each global batch, and
exports. With the last two arguments that process kills itself after that step, and does not come back to a run of as
many.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import checkpoint, data, distributed, inference, observability, ops, sharding, training, weights
from maxlib.training import probes
from tests.training import tiny

LENGTH, ROWS, SHARDS = 12, 8, 4


def documents(source: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(source)
    return [rng.integers(1 + 10 * source, 11 + 10 * source, n, dtype=np.int32) for n in rng.integers(2, 30, count)]


class Recorded(data.Loader):
    """Writes the rows it hands out to `path`, by number of the global batch and number of the row."""

    path: Path

    def __next__(self):
        batch = super().__next__()
        lines = [
            {"batch": self.batches, "row": int(row), "tokens": tokens.tolist(), "segments": segments.tolist()}
            for row, tokens, segments in zip(self.rows, batch["tokens"], batch["segment_ids"], strict=True)
        ]
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        return batch


def loaders() -> tuple[Recorded, data.Loader]:
    sources = {name: data.in_memory(documents(i, 40)) for i, name in enumerate(("web", "code", "wiki"))}
    mixture = data.Mixture(sources, {"web": 3, "code": 2, "wiki": 1}, seed=0)
    rows = lambda part: data.pack(mixture[part], length=LENGTH, bins=4)
    held_out = lambda part: data.pack(data.in_memory(documents(1, 30))[part], length=LENGTH, bins=4)
    return Recorded(rows, batch_size=ROWS, num_shards=SHARDS), data.Loader(held_out, batch_size=ROWS, num_shards=1)


def run(directory: Path, steps: int, callbacks: Sequence[Any] = ()) -> training.Trainer:
    """Over the devices of all processes, or on one; `MESH` and `STRATEGY` say how, by default in FSDP."""
    directory.mkdir(parents=True, exist_ok=True)
    loader, held_out = loaders()
    loader.path = directory / f"rows-{os.getpid()}.jsonl"
    build = lambda: tiny.llama(rope=ops.Rope(12, max_length=64))
    trainer = training.Trainer(
        build,
        optimizer=tiny.optimizer(jax.eval_shape(build)),
        loader=loader,
        loss=tiny.loss,
        directory=directory,
        layout=layout() if jax.process_count() > 1 else None,
        evaluation=training.Evaluation(held_out, every=3),
        checkpointer=checkpoint.Checkpointer(directory / "checkpoints", every=2),
        callbacks=callbacks,
    )
    trainer.fit(steps)
    return trainer


def layout() -> sharding.Layout:
    degrees = sharding.parse_degrees(os.environ.get("MESH", "fsdp=-1"))
    return sharding.Layout(sharding.make_mesh(**degrees), sharding.preset(os.environ.get("STRATEGY", "fsdp")))


def watching(directory: Path) -> list[Any]:
    """Callbacks that compute with the whole model, or meet the other processes."""
    text = lambda model: str(inference.generate(model, [[1, 2, 3]], max_new_tokens=4, dtype=jnp.float32))
    each = probes.LayerStatistics(), probes.Recompute(rows=4), observability.SlowHosts(factor=1e9, size=16)
    return [
        (3, callback)
        for callback in (*each, observability.Samples(directory, text), observability.DumpProgram(directory))
    ]


def main(directory: Path, steps: int, die_after: int = 0, process: int = 0) -> None:
    died = directory / "died"
    if (
        died.exists()
        and died.read_text() == f"{os.environ.get('JAX_PROCESS_ID')} {os.environ.get('JAX_NUM_PROCESSES')}"
    ):
        sys.exit(7)
    distributed.initialize(timeout=120, heartbeat=20, exit_on_error=True)

    def die(trainer) -> None:
        if trainer.step == die_after and jax.process_index() == process and not died.exists():
            died.write_text(f"{process} {jax.process_count()}")
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = run(directory, steps, [(1, die), *watching(directory)] if os.environ.get("WATCHED") else [(1, die)])
    weights.save_pretrained(trainer.model, directory / "model", overwrite=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
