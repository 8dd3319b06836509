"""Exports of the model during training: Hugging Face directories, and checkpoints with parameters only."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlib import nn
from maxlib.checkpoint import Checkpointer, SaveError
from maxlib.training._batch_checks import trained_model
from maxlib.training._optimizer_wrappers import ema_model
from maxlib.training._restore import config_text, items_of
from maxlib.training._state import TrainState
from maxlib.weights import buckets


@runtime_checkable
class Export(Protocol):
    """Protocol of objects that write the model every few steps while training continues."""

    def due(self, step: int) -> bool: ...
    def has(self, step: int) -> bool: ...
    def save(self, step: int, state: TrainState) -> None: ...
    def wait(self) -> None: ...


class HuggingFaceExport:
    """Background export of the model in Hugging Face's format, to `directory/STEP`.

    Directories appear atomically. `save` first copies the model to host memory. With several hosts it writes before it
    returns, because all hosts have to cooperate.

    Args:
        directory: Directory of the exports, or its name in a bucket, such as "gs://bucket/exports".
        every: Number of steps between exports.
        keep: Number of newest exports to keep, without those of later steps that the run has gone back from; None
            keeps all.
        ema: True writes averages of the parameters (`training.ema_model`) instead of the parameters.
        options: Options of `weights.save_pretrained`, such as `dtype`, and `like`, the directory of the original model,
            from which the tokenizer, the chat template and the end-of-text ids are copied, and `chat_template`, the one
            that the model is trained on.

    Raises:
        ValueError: when `every` or `keep` is below 1.
    """

    def __init__(
        self, directory: str | Path, *, every: int, keep: int | None = None, ema: bool = False, **options: Any
    ):
        if every < 1 or (keep is not None and keep < 1):
            raise ValueError(f"every and keep must be at least 1, got every={every} and keep={keep}.")
        in_bucket = buckets.is_bucket(directory)
        self.directory: Any = directory if in_bucket else Path(directory)
        self.every, self.keep, self.ema, self.options = every, keep, ema, options
        self._thread = ThreadPoolExecutor(1, "maxlib-export")
        self._running: tuple[int, Future | None] = -1, None
        if jax.process_index() == 0 and not in_bucket:
            _clean(self.directory)

    def due(self, step: int) -> bool:
        """Returns whether `step` is a multiple of `every`."""
        return step > 0 and step % self.every == 0

    def has(self, step: int) -> bool:
        """Returns whether this step's directory exists or is being written."""
        there = self._running[0] == step or buckets.exists(buckets.child(self.directory, str(step)))
        return there if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.array(there)))

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing, after the previous export has finished. Raises SaveError if that one failed."""
        self.wait()
        model = trained_model(ema_model(state) if self.ema else state.model)  # without the frozen one beside it
        if jax.process_count() > 1:
            self._write(step, model)
        else:
            model = jax.tree.map(np.array, model)  # the next step deletes the arrays
            self._running = step, self._thread.submit(self._write, step, model)

    def wait(self) -> None:
        """Waits until the last export is on disk. Raises SaveError if it failed."""
        (_, running), self._running = self._running, (-1, None)
        if running is not None:
            running.result()

    def _write(self, step: int, model: Any) -> None:
        from maxlib import weights

        try:
            weights.save_pretrained(model, buckets.child(self.directory, str(step)), overwrite=True, **self.options)
        except Exception as error:
            raise SaveError(f"Step {step} could not be exported to {self.directory} ({error}).", step=step) from error
        if jax.process_index() == 0 and self.keep is not None:
            steps = sorted(int(name) for name in buckets.children(self.directory) if name.isdecimal())
            newest = [n for n in steps if n <= step][-self.keep :]  # later ones are of a history that the run left
            for old in {*steps} - {*newest}:
                buckets.remove(buckets.child(self.directory, str(old)))


class ParameterExport:
    """Background export of checkpoints of the model alone, to `directory/STEP`.

    They contain the items `params` and `rest`, a third of a full checkpoint. `Trainer.restore(params_from=...)` and
    `checkpoint.load` read the newest one. If a run goes back to an earlier step, its next export replaces later ones.

    Args:
        directory: Directory of the exports.
        every: Number of steps between exports.
        keep: Number of newest exports to keep; None keeps all.
    """

    def __init__(self, directory: Any, *, every: int, keep: int | None = None):
        self._checkpointer = Checkpointer(directory, every=every, keep=keep, replace=True)
        self.due, self.wait = self._checkpointer.should_save, self._checkpointer.wait

    def has(self, step: int) -> bool:
        """Returns whether this step exists or is being written."""
        return self._checkpointer.has(step)

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing, after the previous export has finished. Raises SaveError if that one failed."""
        self._checkpointer.groupings = nn.tree.groupings(state.rest)
        items = {name: item for name, item in items_of(state).items() if name != "opt"}
        self._checkpointer.save(step, items, meta={"model": config_text(state.rest)})


def _clean(directory: Path) -> None:
    """Removes leftovers of a killed export: an unfinished directory, or a complete one that was about to be
    replaced.
    """
    for old in directory.glob(".*.old-*"):
        there = directory / old.name[1:].rpartition(".old-")[0]
        shutil.rmtree(old) if there.exists() else old.rename(there)
    for part in directory.glob(".*.part-*"):
        shutil.rmtree(part)
