"""Barriers between the hosts of a save, at which a host whose part failed reports it instead of not arriving."""

import itertools
import json
import sys
import threading
from typing import Any

import jax

from maxlib.distributed import PeerError

_saves = itertools.count()
_PHASES = ("async_write_complete", "async_commit_complete")  # as orbax calls them


class SaveBarrier:
    """Barriers of orbax's asynchronous saves, its `barrier_sync_fn`.

    Orbax's threads wait at `_PHASES` when all arrays are written and when the step is committed. A host that fails
    would never arrive, and the others would wait for a timeout of 20 minutes. Here it arrives too, after storing its
    error at jax's coordinator, and the others raise PeerError as soon as their own part is done.
    """

    def __init__(self):
        self.start()

    def start(self) -> None:
        """Begins a save. All hosts must call it, in the same order."""
        self._name, self._thread = f"maxlib_save_{next(_saves)}", threading.get_ident()
        self._phase, self._failed = 0, False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all hosts.

        Args:
            key: Orbax's name for the barrier.
            timeout_ms: Milliseconds until the wait fails.

        Raises:
            PeerError: When another host's part of the save failed.
        """
        if jax.process_count() == 1:
            return
        if any(phase in key for phase in _PHASES):
            self._arrive(timeout_ms)
            self._check()
            return
        # Orbax's thread reaches its last barrier, which is neither of the two, while handling the error that ends it.
        error = sys.exc_info()[1] if threading.get_ident() != self._thread else None
        if error is not None and not self._failed and self._phase < len(_PHASES):
            self._tell(error)
            self._arrive(timeout_ms)
        _client().wait_at_barrier(key, timeout_ms)

    def _arrive(self, timeout_ms: int) -> None:
        self._phase += 1
        _client().wait_at_barrier(f"{self._name}_{self._phase}", timeout_ms)

    def _tell(self, error: BaseException) -> None:
        self._failed = True
        text = json.dumps([jax.process_index(), f"{type(error).__name__}: {error}"[:500]])
        _client().key_value_set(f"{self._name}/{jax.process_index()}", text)

    def _check(self) -> None:
        if told := _client().key_value_dir_get(self._name):
            self._failed = True
            process, error = json.loads(told[0][1])
            raise PeerError(f"saving failed in process {process}: {error}")


def _client() -> Any:
    """Returns the client of jax's coordinator, which orbax uses too; it is not public."""
    from jax._src import distributed

    return distributed.global_state.client
