"""Threads of an engine: those that step it take turns, and one of its own steps it for those who wait."""

import contextlib
import contextvars
import functools
import threading
from typing import Any


class Turns:
    """A lock that is fair to those who wait: without the door a thread that steps would get in first again."""

    def __init__(self):
        self._lock, self._door = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Background:
    """A thread that steps an engine until nothing is left."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, engine: Any) -> None:
        """Starts the thread, unless it runs already."""
        with self._lock:
            if self._thread is None:
                run = functools.partial(contextvars.copy_context().run, self._run, engine)
                self._thread = threading.Thread(target=run, name="maxlib-engine", daemon=True)
                self._thread.start()

    def _run(self, engine: Any) -> None:
        while True:
            with contextlib.suppress(Exception):  # its requests raise it
                while engine.step():
                    pass
            with self._lock:
                if engine.is_idle:
                    self._thread = None
                    return
