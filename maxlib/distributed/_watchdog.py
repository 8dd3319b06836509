"""Where every thread stands: on SIGUSR1, periodically, or when nothing has moved for long."""

import contextlib
import faulthandler
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def dump_stacks(path: str | Path | None = None, *, every: float | None = None) -> Iterator[None]:
    """Inside, `kill -USR1 PID` writes every thread's stack to `path` (default: stderr); so does every `every` seconds,
    if given.

    It needs no help of the interpreter, so it works while the program hangs in a driver or a collective. A process has
    one periodic dump: the last one asked for. Not on Windows.
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


class Watchdog:
    """Dumps every thread's stack when no step has ended for `seconds`, and again after as long; it ends nothing.

    A callback for every step, `callbacks=[(1, Watchdog(300))]`; call it in a loop of your own. `close` ends it.
    `distributed.deadline` is what ends a process that hangs.
    """

    def __init__(self, seconds: float, path: str | Path | None = None):
        self._files = contextlib.ExitStack()
        self._seconds, self._file, self._armed = seconds, self._files.enter_context(_writable(path)), -float("inf")

    def __call__(self, trainer: Any = None) -> None:
        if (now := time.monotonic()) - self._armed < self._seconds / 100:
            return  # arming costs a thread
        self._armed = now
        faulthandler.dump_traceback_later(self._seconds, repeat=True, file=self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._files.close()


@contextlib.contextmanager
def _writable(path: str | Path | None) -> Iterator[Any]:
    if path is None:
        yield sys.__stderr__ or sys.stderr
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        yield file
