"""Overhead of the `Trainer` over a bare loop, at about 10 ms per step.

    python -m tests.benchmarks.trainer [--steps 500 --rounds 7 --batch 8]

Both run the same compiled step on the same batches. The trainer writes metrics.jsonl and goodput.jsonl, shows its
progress, watches its deadlines and reads from a loader that counts. Rounds alternate between the two; the overhead is
the median over rounds of the difference in the same round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from maxlib import ops, training
from maxlib.models import llama

VOCAB, LENGTH = 256, 64


class Rows:
    """A loader of one batch that is always there."""

    def __init__(self, batch: int):
        tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, LENGTH + 1), np.int32)
        self.batch, self.count = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return self.batch

    def metrics(self):
        return {"data/batches": self.count}

    def reset(self):
        self.count = 0

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def build():
    size = {"num_layers": 2, "dim": 64, "mlp_dim": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
    return llama.Llama(llama.Config(vocab=VOCAB, rope=ops.Rope(32), **size), rngs=nnx.Rngs(0))


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {"steps": 500, "rounds": 7, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    optimizer = training.adamw(1e-3, mask=training.decay_mask(jax.eval_shape(build)))
    rows = Rows(args.batch)
    directory = Path(tempfile.mkdtemp(prefix="maxlib-bench-"))
    trainer = training.Trainer(build, optimizer=optimizer, loader=rows, directory=directory)
    trainer.fit(3)
    state = training.make_state(build(), optimizer)

    def by_hand():
        nonlocal state
        for _ in range(args.steps):
            state, metrics = trainer.train_step(state, jax.device_put(next(rows)))
        jax.block_until_ready(metrics)

    bare, ours = [], []
    for _ in range(args.rounds):
        bare.append(seconds(by_hand) / args.steps)
        ours.append(seconds(lambda: trainer.fit(trainer.step + args.steps)) / args.steps)
    more = statistics.median(b - a for a, b in zip(bare, ours, strict=True))
    print(f"bare loop {1e3 * statistics.median(bare):.2f} ms a step, trainer {1e3 * statistics.median(ours):.2f} ms")
    print(f"the trainer takes {1e6 * more:.0f} us a step more, {more / 10e-3:.2%} of 10 ms")


if __name__ == "__main__":
    main()
