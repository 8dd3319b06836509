"""Turns Ctrl-C and SIGTERM into a request to stop, which the training loop handles between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils


class Interrupted(SystemExit):
    """Raised when training was asked to stop and has saved.

    If it is not caught, it ends the program without a traceback, with status 128 + signal.
    """


class StopRequest:
    """A request to stop, made by a signal. While `waiting` it is raised immediately, because nothing is lost."""

    def __init__(self):
        self.signal: int | None = None
        self.waiting = False

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; all processes get the same answer."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Wraps a wait that may be interrupted."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def check(self) -> None:
        """Raises Interrupted after a signal, within work that may be interrupted; several processes only stop between
        steps.
        """
        if self.signal is not None and jax.process_count() == 1:
            raise self.stop()

    def stop(self) -> Interrupted:
        return Interrupted(128 + int(self.signal or 0))

    def _handle(self, number: int, frame) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if jax.process_count() > 1:  # others may be a step ahead: jax agrees on a step after which all stop
            signal.raise_signal(signal.SIGTERM)
            return
        self.signal = number
        if self.waiting:
            raise self.stop()


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Catches SIGINT and SIGTERM in the body. A second Ctrl-C acts immediately; repeated SIGTERMs count once.

    Does nothing outside the main thread. With several processes both go to jax, which tells all of them to stop after
    the same step.
    """
    request = StopRequest()
    numbers = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, request._handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
