"""Calls in a separate process or thread, each with a timeout; one that hangs or crashes is replaced."""

import collections
import contextlib
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

Failure = Literal["timeout", "ended"]


class TimedProcess:
    """A process that runs one call at a time; it is replaced when a call times out or the process ends.

    Functions, arguments and results are pickled, so functions must be importable from a module, and should not raise.

    Args:
        functions: The functions that it can call, by index.
        in_thread: True for a thread, which calls the functions themselves. It cannot be killed: a call that timed out
            goes on, and its result is dropped.
    """

    def __init__(self, functions: Sequence[Callable[[Any], Any]], *, in_thread: bool = False):
        self.functions, self.in_thread = functions, in_thread
        self._begin()

    @property
    def idle(self) -> bool:
        """Returns True if it waits for a call."""
        return self.ready and self.job is None

    def start(self, job: Any, number: int, argument: Any, timeout: float) -> None:
        """Calls a function.

        Args:
            job: Name of the call, returned with its result; not None.
            number: Index of the function.
            argument: Its argument.
            timeout: Time limit in seconds.
        """
        self.pipe.send((number, argument))
        self.job, self.deadline = job, time.monotonic() + timeout

    def result(self) -> tuple[Any, Any, Failure | None] | None:
        """Returns job, result and failure of a finished call, or None if the process has only started.

        Raises:
            RuntimeError: when the process ended before it was ready.
        """
        value, failure = None, None
        try:
            value, failure = (self.pipe.recv(), None) if self.pipe.poll() else (None, "timeout")
        except (EOFError, OSError):
            failure = "ended"
        if not self.ready:
            if failure:
                raise RuntimeError(f"a process ended before it was ready: {self.functions} must be importable")
            self.ready = True
            return None
        job, self.job, self.deadline = self.job, None, math.inf
        if failure:
            self.replace()
        return job, value, failure

    def replace(self) -> None:
        """Ends the process and starts another one."""
        self.end()
        self._begin()

    def end(self) -> None:
        """Ends the process."""
        if not self.in_thread:
            self.process.kill()
            self.process.join()
        self.pipe.close()

    def _begin(self) -> None:
        # Spawn instead of fork, because a fork lacks the parent's threads, of which XLA has many.
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        make = threading.Thread if self.in_thread else context.Process
        self.process: Any = make(target=_serve, args=(other, self.functions), daemon=True)
        self.process.start()
        if not self.in_thread:
            other.close()
        self.job, self.ready, self.deadline = None, False, math.inf


def wait_for_any(processes: Sequence[TimedProcess]) -> list[TimedProcess]:
    """Waits for an answer or a timeout, and returns those processes; ignores processes without a call."""
    busy = [process for process in processes if not process.idle]
    until = min((process.deadline for process in busy), default=0.0) - time.monotonic()
    answered = wait([process.pipe for process in busy], None if math.isinf(until) else max(until, 0.0))
    return [process for process in busy if process.pipe in answered or process.deadline <= time.monotonic()]


def results(
    processes: Sequence[TimedProcess], queues: Sequence[collections.deque[tuple[Any, int, Any]]], timeout: float
) -> Iterator[tuple[Any, Any, Failure | None]]:
    """Yields job, result and failure of every call, in the order in which they end.

    Args:
        processes: The processes.
        queues: The calls of each process, which may share a queue: job, index of the function and argument.
        timeout: Time limit in seconds of one call.
    """
    for process in processes:
        # Of a caller that was interrupted, the answer would be taken for one of these calls.
        if process.job is not None or (process.ready and not process.process.is_alive()):
            process.replace()
    while any(queues) or not all(process.job is None for process in processes):
        for process, queue in zip(processes, queues, strict=True):
            if queue and process.idle:
                process.start(*queue.popleft(), timeout)
        for process in wait_for_any(processes):
            if (done := process.result()) is not None:
                yield done


def _serve(pipe: Connection, functions: Sequence[Callable[[Any], Any]]) -> None:
    """Answers calls until the parent closes the pipe."""
    with pipe, contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send("ready")
        while True:
            number, argument = pipe.recv()
            pipe.send(functions[number](argument))
