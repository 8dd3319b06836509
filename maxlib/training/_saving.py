"""Exports of the model during training, Hugging Face directories and checkpoints with parameters only; and how a
trainer runs them beside its checkpoints. A failed save is reported, and training continues.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlib import nn
from maxlib.checkpoint import Checkpointer, SaveError, Tiers
from maxlib.distributed import hard_timeout
from maxlib.observability import GoodputRecorder
from maxlib.training._batch_checks import trained_model
from maxlib.training._optimizer_wrappers import ema_model
from maxlib.training._restore import config_text, items_of, record_of, save
from maxlib.training._state import TrainState
from maxlib.training.losses import Batch, LossFunction
from maxlib.training.probes._faults import find_nonfinite
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


class SaveManager:
    """Runs `checkpointer` and `exports` with one clock and one time limit."""

    def __init__(
        self,
        checkpointer: Checkpointer | Tiers | None,
        exports: Sequence[Export],
        *,
        clock: GoodputRecorder,
        timeout: float | None,
        log: Callable[[str], Any],
    ):
        self.checkpointer, self.exports = checkpointer, list(exports)
        self._base: dict[str, str] | None = None
        self._clock, self._timeout, self._log = clock, timeout, log

    def start(
        self, step: int, state: TrainState, data_state: Any, metrics: Mapping[str, Any], *, urgent: bool = False
    ) -> None:
        """Starts a checkpoint, after exports of earlier steps have finished so that a kill cannot lose them (not if
        `urgent`).
        """
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        for export in self.exports if not urgent else ():
            if not export.has(step):
                self._try(export.wait, "the export before this checkpoint to be written")
        numbers = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
        if checkpointer.base is not None and self._base is None:
            self._base = record_of(state, checkpointer.base)

        def begin() -> None:
            save(checkpointer, state, step, data_state, numbers, base=self._base)

        if not self._try(begin, f"the checkpoint of step {step} to be taken"):
            self._continue_or_raise(checkpointer)

    def export(self, step: int, state: TrainState, *, missing: bool = False, last: bool = False) -> None:
        """Starts the exports that are due, or all of them at the `last` step, where those that were due exist; with
        `missing`, only those that do not exist.
        """
        for export in self.exports:
            due = export.due(step)
            if (last or due) and not ((missing or (last and due)) and export.has(step)):
                self._try(lambda export=export: export.save(step, state), f"the export of step {step} to be taken")

    def export_is_due(self, step: int) -> bool:
        """Returns True if `export` would start an export."""
        return any(export.due(step) for export in self.exports)

    def wait(self) -> None:
        """Waits until everything is on disk."""
        for part in [self.checkpointer, *self.exports]:
            if part is not None:
                self._try(part.wait, "the last checkpoint or export to be written")

    def settle(self) -> None:
        """Waits for this process's part of the last checkpoint, after an error that other processes may not have."""
        if self.checkpointer is not None:
            self._try(self.checkpointer.settle, "this process's part of the last checkpoint to be written")

    def last_good(self) -> str:
        """Returns a sentence that names the last good checkpoint."""
        if self.checkpointer is None:
            return "There is no checkpoint, because this trainer has no checkpointer"
        self.wait()
        latest = self.checkpointer.latest()
        if latest is None:
            return "There is no good checkpoint yet"
        return f"The last good checkpoint is that of step {latest}"

    def cause(self, step: int, state: TrainState, batch: Batch | None, loss: LossFunction) -> str:
        """Returns a sentence that names the first tensor of a bad step that is not finite.

        The step is recomputed with the parameters of the last good checkpoint, because its own no longer exist.
        """
        if self.checkpointer is None or batch is None or self.checkpointer.latest() is None:
            return ""
        try:
            good = self.checkpointer.restore(like={"params": state.trainable})
            model = nn.combine(good["params"], state.rest)
            origin = find_nonfinite(model, batch, loss, jax.random.fold_in(state.key, step - 1))
        except Exception as error:  # such as too little memory: still report what is known
            return f"Its origin could not be found: {type(error).__name__}: {error}."
        recomputed = f"With the parameters of step {good['meta']['step']} and this step's batch"
        if origin:
            return f"{recomputed}: {origin}."
        return f"{recomputed} everything is finite: the parameters became bad since then."

    def _try(self, call: Callable[[], Any], what: str) -> bool:
        """Returns True if `call` succeeds; logs a SaveError of this or the previous save in one line."""
        try:
            with self._clock.span("save"), hard_timeout(self._timeout, what):
                call()
        except SaveError as error:
            self._log(f"NOT SAVED: {' '.join(str(error).split())}")
            return False
        return True

    def _continue_or_raise(self, checkpointer: Checkpointer | Tiers) -> None:
        """Raises UnsavedError once the checkpointer has failed too often."""
        if error := checkpointer.unsaved():
            raise error
        self._log("Training continues without saving.")
