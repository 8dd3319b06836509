"""A small training run with all its background threads, which kills itself at a chosen moment; `tests.training.kill`
forks it.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from etils.epath import backend

from maxlib import checkpoint, data, distributed, ops, training
from maxlib.checkpoint import _restore as restore
from maxlib.checkpoint import _storage as storage
from maxlib.training import _trainer as trainer_module
from tests.training import tiny

STEPS = 24
MOMENTS = (
    "any", "step", "snapshot", "write", "rename", "deletion", "verification", "export", "evaluation", "data", "restore", "end",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """To die with `number` at the `nth` time that `moment` comes, `delay` seconds into it; None: when it is over.
    "any": since the start.
    """

    moment: str
    nth: int = 1
    delay: float | None = 0.0
    number: int = signal.SIGKILL


class Watch:
    """Tracks the phase of every thread of this process, and executes the plan."""

    def __init__(self, plan: Plan | None, pipe: int):
        self._plan, self._pipe, self._lock = plan, pipe, threading.Lock()
        self._now, self._seen = Counter(), Counter()
        self.seconds: dict[str, list[float]] = {}
        if plan is not None and plan.moment == "any":
            self._die_in(plan.delay or 0.0)

    @contextlib.contextmanager
    def at(self, moment: str) -> Iterator[None]:
        begin = time.monotonic()
        with self._lock:
            self._now[moment] += 1
            self._seen[moment] += 1
            mine = self._plan is not None and (self._plan.moment, self._plan.nth) == (moment, self._seen[moment])
        if mine and self._plan.delay is not None:
            self._die_in(self._plan.delay)
        try:
            yield
        finally:
            with self._lock:
                self._now[moment] -= 1
                self.seconds.setdefault(moment, []).append(time.monotonic() - begin)
            if mine and self._plan.delay is None:
                self._die()

    def around(self, owner: Any, name: str, moment: str) -> None:
        """Counts every call of `owner.name` as `moment`."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.at(moment):
                return original(*args, **kwargs)

        setattr(owner, name, watched)

    def _die_in(self, seconds: float) -> None:
        if seconds == 0.0:
            self._die()
        else:
            threading.Thread(target=lambda: (time.sleep(seconds), self._die()), daemon=True).start()

    def _die(self) -> None:
        doing = sorted(moment for moment, count in self._now.items() if count)
        os.write(self._pipe, (json.dumps(doing) + "\n").encode())
        os.kill(os.getpid(), self._plan.number)


def run(directory: Path, plan: Plan | None, pipe: int) -> None:
    """Trains on from where `directory` stands, and leaves `final.json` at the end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)
    watch = Watch(plan, pipe)
    for part, name, moment in (
        (training.Trainer, "_dispatch_step", "step"),
        (training.Trainer, "evaluate", "evaluation"),
        (training.Trainer, "restore", "restore"),
        (training.Trainer, "_save_at_end", "end"),
        (training.HuggingFaceExport, "_write", "export"),
        (storage.Steps, "save", "snapshot"),
        (storage.Steps, "wait", "write"),
        (restore, "damaged_leaves", "verification"),
        (backend.os_backend, "rename", "rename"),
        (backend.os_backend, "rmtree", "deletion"),
    ):
        watch.around(part, name, moment)
    trainer_module.jit_step = tiny.jit_step
    trainer = make_trainer(directory, watch)
    told = trainer.restore()
    print(f"began at {trainer.step}: {told}", flush=True)
    try:
        trainer.fit(STEPS)
    except distributed.Interrupted:
        print(f"stopped at {trainer.step}", flush=True)
        raise
    ended = time.monotonic()
    trainer.checkpointer.close()
    final = {"state": digests(trainer.state), "ended": ended, "seconds": watch.seconds}
    (directory / "final.json").write_text(json.dumps(final))


def make_trainer(directory: Path, watch: Watch) -> training.Trainer:
    model = tiny.llama(rope=ops.Rope(12, max_length=64))
    return training.Trainer(
        model,
        optimizer=training.adamw(1e-2, mask=training.decay_mask(model)),
        loss=tiny.loss,
        loader=loader(watch, seed=0, documents=400),
        evaluation=training.Evaluation(loader(watch, seed=1, documents=12), every=4),
        directory=directory,
        checkpointer=checkpoint.Tiers(
            checkpoint.Checkpointer(directory / "near", every=2, keep=1),
            checkpoint.Checkpointer(directory / "checkpoints", every=4, keep=2, best=checkpoint.Best("eval/loss")),
        ),
        callbacks=[
            training.HuggingFaceExport(directory / "exports", every=8),
            training.ParameterExport(directory / "parameters", every=12),
        ],
    )


def loader(watch: Watch, *, seed: int, documents: int) -> data.Loader:
    rng = np.random.default_rng(seed)
    texts = [{"tokens": rng.integers(0, tiny.VOCAB, rng.integers(3, 20), np.int32)} for _ in range(documents)]

    def read(document: dict) -> dict:
        with watch.at("data"):
            return document

    source = grain.MapDataset.source(texts).map(read)
    rows = lambda part: data.pack(source[part], length=12, bins=4)
    return data.Loader(rows, batch_size=4, num_shards=2)


def digests(state: training.TrainState) -> dict[str, str]:
    """A hash of the bits of every array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(
        (state.trainable, state.opt_state, state.step, jax.random.key_data(state.key))
    )
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in leaves}
