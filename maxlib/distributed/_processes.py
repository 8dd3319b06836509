"""What the processes of a run do together besides computing."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_barriers = itertools.count()


@contextmanager
def main_process_first(what: str, *, timeout: float = 3600) -> Iterator[None]:
    """Runs the body in the first process before the others, who find on disk what it made there: `what`, by name.

    All processes have to come here in the same order; after `timeout` seconds those that wait give up.
    """
    if jax.process_index() != 0:
        _wait_for_all(what, timeout)
    yield
    if jax.process_index() == 0 and jax.process_count() > 1:
        _wait_for_all(what, timeout)


def _wait_for_all(what: str, timeout: float) -> None:
    """Waits by jax's coordinator: the first collective among CPUs gives up when others come half a minute later."""
    from jax._src import distributed  # what orbax waits with; it has no public name

    client = distributed.global_state.client
    if client is None:  # TPU pods that started without `initialize`
        multihost_utils.sync_global_devices(what)
    else:
        client.wait_at_barrier(f"maxlib {what} {next(_barriers)}", int(timeout * 1000))


class PeerError(RuntimeError):
    """Another process could not do its part of what all do together."""


@contextmanager
def raise_on_all(what: str) -> Iterator[None]:
    """Ends the body well in all processes, or raises in all of them: PeerError, naming `what`, where only another's
    failed.

    All have to come to its end, so a body in which one fails must not let the others wait for it.
    """
    error = None
    try:
        yield
    except Exception as failed:
        error = failed
    said = allgather_json(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for process, text in enumerate(said):
        if text is not None:
            raise PeerError(f"{what} failed in process {process}: {text}")


def allgather_json(value: Any) -> list[Any]:
    """Collects everybody's `value`, of JSON's types, in the order of the processes; all of them have to call it."""
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: mine.size] = mine
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[: int(size)].tobytes()) for row, size in zip(everyone, np.ravel(sizes), strict=True)]
