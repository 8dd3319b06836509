"""Checkpoints and exports of a trainer. A failed save is reported, and training continues."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxlib import nn
from maxlib.checkpoint import Checkpointer, SaveError, Tiers
from maxlib.distributed import hard_timeout
from maxlib.observability import GoodputRecorder
from maxlib.training._export import Export
from maxlib.training._restore import record_of, save
from maxlib.training._state import TrainState
from maxlib.training.losses import Batch, LossFunction
from maxlib.training.probes._faults import find_nonfinite


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
