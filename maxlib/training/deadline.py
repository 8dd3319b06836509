"""A time limit on what may hang for ever: start-up, compilation, data, peers."""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process loudly, naming `what`, when the body takes longer than `seconds`.

    A thread stuck in a collective or a driver takes no exception, so the process exits with status 75 after printing where
    every thread stands; a supervisor may start it again.
    """
    timer = threading.Timer(seconds, _die, (seconds, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _die(seconds: float, what: str) -> None:
    print(f"\nmaxlib: waited {seconds:g} s for {what}; giving up. Every thread stands at:", file=sys.__stderr__)
    faulthandler.dump_traceback(file=sys.__stderr__)
    os._exit(75)
