"""Collective operations between the processes of a run, other than computation."""

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
    """Runs the body in the first process before the others, which then find its files on disk.

    All processes must enter in the same order.

    Args:
        what: Name of the first process's result, for messages.
        timeout: Seconds after which waiting processes raise an error.
    """
    if jax.process_index() != 0:
        _wait_for_all(what, timeout)
    yield
    if jax.process_index() == 0 and jax.process_count() > 1:
        _wait_for_all(what, timeout)


def _wait_for_all(what: str, timeout: float) -> None:
    """Waits at jax's coordinator, because the first collective on CPUs times out if others are half a minute late."""
    from jax._src import distributed  # used by orbax too; it is not public

    client = distributed.global_state.client
    if client is None:  # TPU pods that started without `initialize`
        multihost_utils.sync_global_devices(what)
    else:
        client.wait_at_barrier(f"maxlib {what} {next(_barriers)}", int(timeout * 1000))


class PeerError(RuntimeError):
    """Error for a collective operation in which another process failed."""


@contextmanager
def raise_on_all(what: str) -> Iterator[None]:
    """Succeeds in all processes, or raises in all of them.

    Every process must reach the end of the body, so the body must not wait for processes that may fail inside it.

    Args:
        what: Name of the operation, for messages.

    Raises:
        PeerError: when the body failed only in another process.
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
    """Collects a value from every process, in order; all of them must call it.

    Args:
        value: This process's value, of JSON types.
    """
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: mine.size] = mine
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[: int(size)].tobytes()) for row, size in zip(everyone, np.ravel(sizes), strict=True)]
