"""A training run for fault injection: `python -m tests.training.chaotic DIRECTORY PAUSE PACED`.

It trains on a packed mixture on all processes, saves near every five steps and in one place every ten, and leaves
`final-*.json`. PAUSE: seconds that
each of the first PACED steps lasts longer. `DIRECTORY/faults` holds what nothing outside of a process can do, and the
file `end` with the last step, a multiple of `CHUNK`, once that is known.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather

from maxlib import checkpoint, data, distributed, sharding, training
from maxlib.checkpoint import _storage as storage
from tests.training import tiny
from tests.training.killable import digests
from tests.training.soak import Smallest

NEAR, EVERY, CHUNK, DEADLINE, SLOW = 5, 10, 50, 15.0, 3.0


class Faults:
    """Faults requested by files in a directory: `clock` holds seconds to add to the time, `slow` delays records of
    saves, and a reader of data that finds `data` takes it away and fails.
    """

    def __init__(self, directory: Path):
        self._directory, self._real = directory, time.time
        directory.mkdir(parents=True, exist_ok=True)
        write = storage._Text._write

        async def slowly(text: Any, path: Any) -> None:
            if (directory / "slow").exists():
                await asyncio.sleep(SLOW)
            await write(text, path)

        storage._Text._write = slowly
        threading.Thread(target=self._watch_clock, daemon=True).start()

    def read(self, document: np.ndarray) -> np.ndarray:
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "data").unlink()
            raise OSError(5, "a reader of the data was killed")
        return document

    def end(self) -> float:
        end = self._directory / "end"
        return int(end.read_text()) if end.exists() else float("inf")

    def _watch_clock(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                by = float((self._directory / "clock").read_text())
                time.time = lambda by=by: self._real() + by
            time.sleep(0.1)


def loader(faults: Faults) -> data.Loader:
    rng = np.random.default_rng(0)
    texts = lambda: [rng.integers(0, tiny.VOCAB, n, np.int32) for n in rng.integers(3, 20, 200)]
    mixture = data.Mixture({name: data.in_memory(texts()) for name in "ab"}, {"a": 2, "b": 1}, seed=0)
    rows = lambda part: data.pack(mixture[part].map(faults.read), length=12, bins=4)
    return data.Loader(rows, batch_size=8, num_shards=4, timeout=DEADLINE)


def main(directory: Path, pause: float, paced: int) -> None:
    distributed.initialize(timeout=120, heartbeat=20)
    faults = Faults(directory / "faults")
    trainer = training.Trainer(
        lambda: Smallest(dim=16, rngs=nnx.Rngs(0)),
        optimizer=training.adamw(1e-2, mask=None),
        loader=loader(faults),
        loss=tiny.loss,
        directory=directory,
        layout=sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP) if jax.process_count() > 1 else None,
        checkpointer=checkpoint.Tiers(
            checkpoint.Local(directory / f"disk-{jax.process_index()}", every=NEAR, max_failed_saves=20),
            checkpoint.Checkpointer(directory / "checkpoints", every=EVERY, keep=3, max_failed_saves=20),
        ),
        callbacks=[(1, lambda trainer: time.sleep(pause if trainer.step <= paced else 0.0))],
        timeout=DEADLINE,
    )
    trainer.restore()
    if jax.process_index() == 0:
        print(f"began at {trainer.step}", flush=True)
    while trainer.step < faults.end():
        trainer.fit((trainer.step // CHUNK + 1) * CHUNK)
    trainer.checkpointer.close()
    final = {"state": digests(gathered(trainer.state)), "data": trainer.loader.get_state()}
    (directory / f"final-{jax.process_index()}.json").write_text(json.dumps(final))


def gathered(state: training.TrainState) -> training.TrainState:
    """The state with all of each array on every process."""
    if jax.process_count() == 1:
        return state
    on_host = lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else process_allgather(x, tiled=True)
    return jax.tree.map(on_host, state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
