"""What stores of steps have in common: saves that run in the background, one at a time."""

import logging
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax

from maxlib.checkpoint import _policy as policy
from maxlib.checkpoint._errors import SaveError

_log = logging.getLogger(__name__)
Store = TypeVar("Store", bound="Tier")


class Tier:
    """Base class of `Checkpointer` and `Local`; a `with` statement waits for the last save, and closes."""

    _when: policy.When
    _saving: tuple[int, Future] | None  # the step of the save that runs, and its result

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

    def close(self) -> None:
        """Waits for the last save and closes. Raises SaveError if it failed."""
        failed = self._finish()
        self._release()
        if failed is not None:
            raise failed

    def _finish(self) -> SaveError | None:
        """Waits for the running save on all hosts, and returns its error, if any."""
        raise NotImplementedError

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
