"""A time limit on what may hang for ever: start-up, compilation, data, peers."""

import faulthandler
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_pending: dict[int, tuple[float, float, str]] = {}
_numbers = itertools.count()


@contextmanager
def hard_timeout(seconds: float, what: str) -> Iterator[None]:
    """Ends the process loudly, naming `what`, when the body takes longer than `seconds`.

    A thread that is stuck in a collective or a driver takes no exception, so the process exits with status 75, after
    printing where every thread stands; a supervisor may start it again.
    """
    _watch()
    number = next(_numbers)
    _pending[number] = time.monotonic() + seconds, seconds, what
    try:
        yield
    finally:
        del _pending[number]


@functools.cache
def _watch() -> threading.Thread:
    """One thread looks after all deadlines, so that one costs microseconds."""
    thread = threading.Thread(target=_look, daemon=True, name="maxlib-deadlines")
    thread.start()
    return thread


def _look() -> None:
    while True:
        time.sleep(0.2)
        for end, seconds, what in list(_pending.values()):
            if time.monotonic() > end:
                _die(seconds, what)


def _die(seconds: float, what: str) -> None:
    out = sys.__stderr__ or sys.stderr
    print(f"\nmaxlib: waited {seconds:g} s for {what}; giving up. Every thread stands at:", file=out, flush=True)
    faulthandler.dump_traceback(file=out)
    os._exit(75)
