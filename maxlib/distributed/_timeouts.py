"""Time limits on operations that may hang; at a timeout the stacks of all threads are printed."""

import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator


@dataclasses.dataclass
class _Limit:
    seconds: float
    what: str
    end: float


_pending: dict[int, _Limit] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def hard_timeout(seconds: float | None, what: str) -> Iterator[None]:
    """Ends the process when the body takes longer than `seconds`, after printing the stack of every thread.

    An exception cannot reach a thread that is stuck in a collective or a driver, so the process exits with status 75; a
    launcher may restart it.

    Args:
        seconds: The limit; None means no limit, and starts no thread.
        what: Name of the operation, printed with the stacks.
    """
    if seconds is None:
        yield
        return
    _watch()
    number = next(_numbers)
    _pending[number] = _Limit(seconds, what, time.monotonic() + seconds)
    try:
        yield
    finally:
        del _pending[number]


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
                _report(limit)


def _report(limit: _Limit) -> None:
    out = sys.__stderr__ or sys.stderr
    text = f"\nmaxlib: waited {limit.seconds:g} s for {limit.what}; giving up. Every thread stands at:"
    print(text, file=out, flush=True)
    faulthandler.dump_traceback(file=out)
    os._exit(75)
