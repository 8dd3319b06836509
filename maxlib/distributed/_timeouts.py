"""Time limits on operations that may hang, and dumps of all threads' stacks at a timeout or on request."""

import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class _Limit:
    seconds: float
    what: str
    exits: bool
    end: float


_pending: dict[int, _Limit] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def hard_timeout(seconds: float | None, what: str, *, exit: bool = True) -> Iterator[None]:
    """Ends the process when the body takes longer than `seconds`, after printing the stack of every thread.

    An exception cannot reach a thread that is stuck in a collective or a driver, so the process exits with status 75; a
    launcher may restart it.

    Args:
        seconds: The limit; None means no limit, and starts no thread.
        what: Name of the operation, printed with the stacks.
        exit: False only prints the stacks, every `seconds`, and does not end the process.
    """
    if seconds is None:
        yield
        return
    _watch()
    number = next(_numbers)
    _pending[number] = _Limit(seconds, what, exit, time.monotonic() + seconds)
    try:
        yield
    finally:
        del _pending[number]


@contextlib.contextmanager
def dump_stacks(path: str | Path | None = None, *, every: float | None = None) -> Iterator[None]:
    """Writes the stacks of all threads at `kill -USR1 PID`, and every `every` seconds, while the body runs.

    It does not need the interpreter, so it works while the program hangs in a driver or a collective. A process has
    only one periodic dump, the last one started. Not available on Windows.

    Args:
        path: The file to append to; None is stderr.
        every: Seconds between periodic dumps; None only writes at the signal.
    """
    with _writable(path) as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        if every is not None:
            faulthandler.dump_traceback_later(every, repeat=True, file=file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            if every is not None:
                faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _writable(path: str | Path | None) -> Iterator[Any]:
    if path is None:
        yield sys.__stderr__ or sys.stderr
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        yield file


@functools.cache
def _watch() -> threading.Thread:
    """Starts the one thread that watches all limits, so that a limit costs microseconds."""
    thread = threading.Thread(target=_look, daemon=True, name="maxlib-timeouts")
    thread.start()
    return thread


def _look() -> None:
    while True:
        time.sleep(0.2)
        for limit in list(_pending.values()):
            if time.monotonic() > limit.end:
                limit.end = time.monotonic() + limit.seconds
                _report(limit)


def _report(limit: _Limit) -> None:
    out = sys.__stderr__ or sys.stderr
    then = "giving up" if limit.exits else "still waiting"
    print(
        f"\nmaxlib: waited {limit.seconds:g} s for {limit.what}; {then}. Every thread stands at:", file=out, flush=True
    )
    faulthandler.dump_traceback(file=out)
    if limit.exits:
        os._exit(75)
