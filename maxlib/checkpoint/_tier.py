"""What stores of steps have in common: saves that run in the background, one at a time, and restores."""

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax
from etils import epath

from maxlib import distributed
from maxlib.checkpoint import _policy as policy
from maxlib.checkpoint import _records as records
from maxlib.checkpoint._errors import SaveError, UnsavedError, summary
from maxlib.checkpoint._groupings import Groupings
from maxlib.checkpoint._restore import Wanted, first_undamaged

_log = logging.getLogger(__name__)
Store = TypeVar("Store", bound="Tier")


class Tier:
    """Base class of `Checkpointer` and `Local`; a `with` statement waits for the last save, and closes.

    Args:
        directory: The directory of the steps.
        when: When saves are due.
        groupings: Groupings of the model's stacks.
        max_failed_saves: Consecutive failed saves after which `unsaved` returns an error; None for no limit.
    """

    def __init__(self, directory: epath.Path, when: policy.When, groupings: Groupings, max_failed_saves: int | None):
        self.directory, self.groupings = directory, groupings
        self._when, self._max_failed_saves = when, max_failed_saves
        self._failed_saves, self._last_error = 0, ""
        self._saving: tuple[int, Future] | None = None  # the step of the save that runs, and its result

    def __enter__(self: Store) -> Store:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and jax.process_count() > 1:
            return self._abandon()
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            _log.error("%s", failed)  # and raise the first error

    def should_save(self, step: int) -> bool:
        """Returns whether a save is due after `step`, by `every` or by `seconds`; all hosts get the same answer."""
        return self._when.due(step)

    def restore(
        self,
        step: int | None = None,
        like: dict[str, Any] | None = None,
        *,
        items: Sequence[str] | None = None,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Restores `step`, or the newest undamaged one, with a warning for each damaged step; see `load`."""
        self._wait_quietly()
        wanted = Wanted(like, items, self.groupings, cast)
        if step is None:
            steps = reversed(distributed.allgather_json(self.steps())[0])  # one list for all hosts
            reads = ((step, functools.partial(self._read, step, wanted)) for step in steps)
            restored = first_undamaged(reads, self.directory)
        else:
            restored = self._read(step, wanted)
        self.adopt(restored["meta"]["step"])
        return restored

    def adopt(self, step: int) -> None:
        """Goes on after `step`, which was restored from here or from another tier."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """Lists the complete steps, oldest first."""
        raise NotImplementedError

    def latest(self) -> int | None:
        """Returns the newest complete step, None if there is none."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Waits until the last save is complete. Raises SaveError if it failed."""
        if failed := self._finish():
            raise failed

    def settle(self) -> None:
        """Waits for this process's part of the last save without communicating with other hosts, after an error that
        they may not have.
        """
        if self._saving is not None:
            wait([self._saving[1]])

    def unsaved(self) -> UnsavedError | None:
        """Returns the error that should end the run if `max_failed_saves` consecutive saves failed, else None.

        A `Trainer` checks it after every failed save.
        """
        if self._max_failed_saves is None or self._failed_saves < self._max_failed_saves:
            return None
        last = self._last_good()
        return UnsavedError(
            f"{self._failed_saves} consecutive saves failed, the last with: {self._last_error}; {_say_good(last)}. "
            "Fix the cause and restart, or raise max_failed_saves= (None for no limit) to continue without saving.",
            last_good=last,
        )

    def close(self) -> None:
        """Waits for the last save and closes. Raises SaveError if it failed."""
        failed = self._finish()
        self._release()
        if failed is not None:
            raise failed

    def _finish(self) -> SaveError | None:
        """Waits for the running save on all hosts, and returns its error, if any."""
        raise NotImplementedError

    def _read(self, step: int, wanted: Wanted) -> dict[str, Any]:
        """Reads one step. Raises FileNotFoundError if it is not complete, and DamagedError."""
        raise NotImplementedError

    def _last_good(self) -> int | None:
        """Returns the newest step known to be good."""
        return self.latest()

    def _release(self) -> None:
        """Ends threads and gives back what the object holds."""
        raise NotImplementedError

    def _wait_quietly(self) -> None:
        """Waits for the running save, and logs its error."""
        if failed := self._finish():
            _log.error("%s", failed)

    def _abandon(self) -> None:
        """Ends after an error that other hosts may not have."""
        self.settle()

    def _failed(self, step: int, error: Exception) -> SaveError:
        """Counts a failed save, and returns its error."""
        self._failed_saves += 1
        self._last_error = summary(error)
        where = f"Step {step} could not be saved to {self.directory}"
        message = f"{where} ({self._last_error}); {_say_good(self._last_good())}."
        failed = SaveError(message, step=step, reason=self._last_error)
        failed.__cause__ = error
        return failed

    def _missing(self, step: int, complete: Sequence[int]) -> FileNotFoundError:
        return FileNotFoundError(f"{self.directory} has no complete step {step}; it has {sorted(complete)}.")

    def _meta(self, step: int, meta: Mapping[str, Any] | None, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        """Returns the `meta` that is saved with a step."""
        meta = {**(meta or {}), "format": records.FORMAT, "step": step, "layouts": self.groupings}
        return meta if metrics is None else meta | {"metrics": dict(metrics)}


def of_all_hosts(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Joins the states of all hosts' shards of the data."""
    return {shard: state for states in distributed.allgather_json(dict(data or {})) for shard, state in states.items()}


def _say_good(step: int | None) -> str:
    return "there is no earlier one" if step is None else f"step {step} is the last good one"
