"""What a trainer leaves behind: checkpoints and exports. What cannot be written is said, and training goes on."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxlib import nn
from maxlib.checkpoint import Checkpointer, SaveError, Tiers
from maxlib.distributed._timeouts import hard_timeout
from maxlib.observability._goodput import Clock
from maxlib.training._export import Export
from maxlib.training._objectives.objective import Batch
from maxlib.training._restore import save
from maxlib.training._step import Loss, TrainState
from maxlib.training.probes._nonfinite import find_nonfinite


class Saving:
    """`checkpointer` and `exports` under one clock and one time limit."""

    def __init__(
        self,
        checkpointer: Checkpointer | Tiers | None,
        exports: Sequence[Export],
        *,
        clock: Clock,
        timeout: float | None,
        log: Callable[[str], Any],
    ):
        self.checkpointer, self.exports = checkpointer, list(exports)
        self._clock, self._timeout, self._log = clock, timeout, log

    def start(
        self, step: int, state: TrainState, data_state: Any, metrics: Mapping[str, Any], *, urgent: bool = False
    ) -> None:
        """Starts a checkpoint. Exports of earlier steps come to their end first, lest a kill lose them; not in a
        `urgent`.
        """
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        for export in self.exports if not urgent else ():
            if not export.has(step):
                self._try(export.wait, "the export before this checkpoint to be written")
        numbers = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
        begin = lambda: save(checkpointer, state, step, data_state, numbers)
        self._try(begin, f"the checkpoint of step {step} to be taken")

    def export(self, step: int, state: TrainState, *, missing: bool = False, last: bool = False) -> None:
        """Starts the exports that are due, or all of them at the `last` step; `missing`: only what is not there."""
        for export in self.exports:
            if (last or export.due(step)) and not ((missing or last) and export.has(step)):
                self._try(lambda export=export: export.save(step, state), f"the export of step {step} to be taken")

    def wait(self) -> None:
        """Waits until all is on disk."""
        for part in [self.checkpointer, *self.exports]:
            if part is not None:
                self._try(part.wait, "the last checkpoint or export to be written")

    def settle(self) -> None:
        """Waits for this process's part of the last checkpoint, after an error that other processes need not have."""
        if self.checkpointer is not None:
            self._try(self.checkpointer.settle, "this process's part of the last checkpoint to be written")

    def last_good(self) -> str:
        """Which checkpoint to go back to, in words."""
        if self.checkpointer is None:
            return "There is no checkpoint, as this trainer has no checkpointer"
        self.wait()
        latest = self.checkpointer.latest()
        return (
            "There is no good checkpoint yet"
            if latest is None
            else f"The last good checkpoint is that of step {latest}"
        )

    def cause(self, step: int, state: TrainState, batch: Batch | None, loss: Loss) -> str:
        """Where the numbers of a bad step stop being finite, with the parameters of the last good checkpoint: its own
        are gone.
        """
        if self.checkpointer is None or batch is None or self.checkpointer.latest() is None:
            return ""
        try:
            good = self.checkpointer.restore(like={"params": state.trainable})
            model = nn.combine(good["params"], state.rest)
            found = find_nonfinite(model, batch, loss, jax.random.fold_in(state.key, step - 1))
        except Exception as error:  # such as too little memory: what is known is said all the same
            return f"Where it comes from could not be found out: {type(error).__name__}: {error}."
        with_these = f"With the parameters of step {good['meta']['step']} and this step's batch"
        return f"{with_these}: {found}." if found else f"{with_these} all is finite: the parameters went bad since."

    def _try(self, call: Callable[[], Any], what: str) -> None:
        with self._reporting_errors(), self._clock.span("save"), hard_timeout(self._timeout, what):
            call()

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:  # of this one, or of the one before
            self._log(f"NOT SAVED: {error} Training goes on.")
