"""Trains on a torch DataLoader with maxlib's Trainer, and resumes where it stopped.

The Trainer needs batches of numpy arrays and a state that fits into JSON. Torch's DataLoader has no state, so this
adapter keeps one: the epoch, whose seed gives the order, and how many of its batches were returned. To resume, it draws
the same order again and skips those batches without reading them.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.utils.data import BatchSampler, DataLoader, Dataset

from maxlib import checkpoint, ops, training
from maxlib.models import llama


class Counting(Dataset):
    """Stands for a dataset of yours: row i counts up from i."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(17) + index) % 64
        return {"tokens": row[:-1], "targets": row[1:]}  # a target of -1 is ignored


class TorchLoader:
    """Batches of a torch dataset, shuffled anew in every epoch, without end.

    Args:
      dataset: has a length, and dictionaries of tensors.
      batch_size: rows of a batch; what is left over at the end of an epoch is dropped.
      seed: of the order.
      make: makes the loader, for workers and the like: `partial(DataLoader, num_workers=4)`.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, *, seed: int = 0, make: Callable[..., DataLoader] = DataLoader
    ):
        self.dataset, self.batch_size, self.seed, self.make = dataset, batch_size, seed, make
        self.reset()

    def reset(self) -> None:
        self.set_state({"epoch": 0, "batches": 0})

    def get_state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def set_state(self, state: Any) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]
        self.reading: Iterator | None = None

    def __iter__(self) -> "TorchLoader":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.reading is None:
            self.reading = self._rest_of_epoch()
        batch = next(self.reading, None)
        if batch is None:
            self.set_state({"epoch": self.epoch + 1, "batches": 0})
            return next(self)
        self.batches += 1
        return {name: tensor.numpy().astype(np.int32) for name, tensor in batch.items()}

    def _rest_of_epoch(self) -> Iterator:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.dataset))  # type: ignore[arg-type]
        rows = order[self.batches * self.batch_size :].tolist()
        return iter(self.make(self.dataset, batch_sampler=BatchSampler(rows, self.batch_size, drop_last=True)))


def trainer(directory: str) -> training.Trainer:
    cfg = llama.Config(
        vocab=64, num_layers=2, dim=32, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16,
        rope=ops.Rope(16, max_length=64),
    )  # fmt: skip
    return training.Trainer(
        llama.Llama(cfg, rngs=nnx.Rngs(0)),
        optimizer=training.adamw(1e-2),
        loader=TorchLoader(Counting(), batch_size=8),
        dtype=jnp.float32,
        directory=directory,
        checkpointer=checkpoint.Checkpointer(f"{directory}/checkpoints", every=9),
    )


def main(stop: int = 9) -> bool:
    straight = TorchLoader(Counting(), batch_size=8)
    wanted = [next(straight) for _ in range(stop + 1)][-1]
    with tempfile.TemporaryDirectory() as directory:
        trainer(directory).fit(stop)
        resumed = trainer(directory)  # as another process would, after a crash
        resumed.restore()
        print(f"resumed at step {resumed.step}, {resumed.loader.get_state()}")
        batch = next(resumed.loader)
    same = all(np.array_equal(batch[name], wanted[name]) for name in wanted)
    print(f"the next batch is the one that a run without a stop has: {same}")
    return same


if __name__ == "__main__":
    main()
