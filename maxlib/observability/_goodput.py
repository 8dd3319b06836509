"""Goodput: what the time of a run was spent on, across its restarts."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxlib._utils.files import is_number, read_json

FILE = "goodput.jsonl"
NAMES = {
    "step": "training steps",
    "redone": "steps done again",
    "startup": "start-up",
    "restore": "restoring",
    "compile": "compiling",
    "data": "waiting for data",
    "evaluation": "evaluating",
    "save": "saving",
    "callbacks": "callbacks",
    "idle": "idle",
    "down": "between restarts",
}


class GoodputRecorder:
    """Divides the time of this process among spans (the innermost one counts), and appends it to
    `directory/goodput.jsonl`. Use it from one thread.

    Time outside of spans is `startup` before the first step, and `idle` after it. A line is written every `every`
    seconds, even within a span, so a kill loses at most that much.

    Args:
        directory: The run's directory; None keeps the times in memory.
        every: Seconds between lines.
        age: Seconds that the process had already run; by default the first recorder of a program starts when the
            program did.

    Attributes:
        seconds: The seconds of this process by name.
    """

    def __init__(self, directory: str | Path | None = None, *, every: float = 5.0, age: float | None = None):
        self.seconds: dict[str, float] = {}
        self._path = None if directory is None else Path(directory) / FILE
        self._every, self._stack, self._base, self._step = every, [], "startup", 0
        self._lock, self._unwritten = threading.RLock(), {}
        self._session, self._before = _position(self._path)
        self._at = time.monotonic() - (_age() if age is None else age)
        self._written = -float("inf")
        self._end_of_thread: threading.Event | None = None
        if self._path is not None:
            self._write(at=self._at, begin=self._at, boot=_boot())
            self._start_thread()

    @contextlib.contextmanager
    def span(self, name: str | None) -> Iterator[None]:
        """Counts the body's time as `name`, except for spans inside it. None counts it as the enclosing span."""
        if name is None:
            yield
            return
        self._switch(functools.partial(self._stack.append, name))
        try:
            yield
        finally:
            self._switch(self._stack.pop)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Counts the time of step `number`, as `redone` if an earlier session had already finished it."""
        with self.span("step" if number > self._before else "redone"):
            self._base = "idle"
            yield
        self._step = max(self._step, number)

    def close(self) -> None:
        """Writes pending time. A later span continues, and the time in between counts as idle."""
        self.flush()
        if self._end_of_thread is not None:
            self._end_of_thread.set()

    def flush(self, *, older_than: float = 0.0) -> None:
        """Writes the seconds so far, if the last line is that many seconds old."""
        with self._lock:
            if time.monotonic() - self._written >= older_than:
                self._charge()
                self._write(at=self._at, step=self._step, seconds=self._unwritten)

    def _switch(self, change: Callable[[], Any]) -> None:
        with self._lock:
            self._charge()
            change()
        self._start_thread()

    def _charge(self) -> None:
        now = time.monotonic()
        name = self._stack[-1] if self._stack else self._base
        for seconds in (self.seconds, self._unwritten):
            seconds[name] = seconds.get(name, 0.0) + now - self._at
        self._at = now

    def _start_thread(self) -> None:
        """Starts the thread that writes while this one is busy, unless it runs; it ends with `close` or the object."""
        running = self._end_of_thread is not None and not self._end_of_thread.is_set()
        if self._path is not None and not running:
            self._end_of_thread = threading.Event()
            arguments = weakref.ref(self), self._end_of_thread, self._every
            threading.Thread(target=_flush_periodically, args=arguments, daemon=True, name="maxlib-goodput").start()

    def _write(self, *, seconds: dict[str, float] | None = None, **line: Any) -> None:
        """Writes a line in one call, so that a kill cannot truncate it. If writing fails (a full disk), the line waits
        for the next time.
        """
        self._written = time.monotonic()
        if self._path is not None:
            line = {"session": self._session, "time": time.time(), **line}
            if seconds is not None:
                line["seconds"] = {name: round(value, 6) for name, value in seconds.items()}
            try:
                _append(self._path, json.dumps(line) + "\n")
            except OSError:
                return
        self._unwritten = {}


def _flush_periodically(recorder: "weakref.ref[GoodputRecorder]", end: threading.Event, every: float) -> None:
    while not end.wait(min(0.5, every)):
        if (alive := recorder()) is None:
            return
        alive.flush(older_than=every)
        del alive  # so that an unused recorder can be deleted


_recorders = itertools.count()


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # the machine crashed in the middle of a line
            text = "\n" + text
        os.write(file, text.encode())
    finally:
        os.close(file)


def _position(path: Path | None) -> tuple[int, int]:
    """Returns the index of the new session, and the highest step that earlier sessions finished."""
    lines = [] if path is None else _lines(path)
    session = max((line["session"] for line in lines), default=-1) + 1
    return session, max((line.get("step", 0) for line in lines), default=0)


def _lines(path: Path) -> list[dict[str, Any]]:
    texts = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [line for line in map(read_json, texts) if _is_line(line)]


def _is_line(line: Any) -> bool:
    """Returns whether a line was written by a `GoodputRecorder`."""
    if not isinstance(line, dict) or not {"session", "at", "time"} <= line.keys():
        return False
    seconds = line.get("seconds", {})
    numbers = [line[name] for name in ("at", "time", "begin") if name in line]
    return (
        isinstance(seconds, dict)
        and all(map(is_number, [*numbers, *seconds.values()]))
        and all(isinstance(line.get(name, 0), int) and is_number(line.get(name, 0)) for name in ("session", "step"))
    )


def _boot() -> str | None:
    """Identifies the boot from which `time.monotonic` counts; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _age() -> float:
    """Returns how long this program has run, for its first recorder; interactive sessions begin with the recorder."""
    if next(_recorders) or getattr(sys, "ps1", None) or "ipykernel" in sys.modules:
        return 0.0
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):
        return 0.0


@dataclasses.dataclass(frozen=True)
class GoodputSummary:
    """The time of a run.

    Args:
        seconds: Seconds by name; `down` is the time between two processes.
        sessions: Number of processes.
        steps: Number of the last step.
    """

    seconds: dict[str, float]
    sessions: int
    steps: int

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Returns the share of the time spent in steps that were not repeated."""
        return self.seconds.get("step", 0.0) / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        head = f"goodput {self.goodput:.1%} of {self.wall:,.1f} s; {self.steps} steps in {self.sessions} process(es)"
        wall = self.wall or 1.0
        rows = [f"  {NAMES.get(k, k):34}{v:12,.1f} s {v / wall:7.1%}" for k, v in self.seconds.items()]
        return "\n".join([head, *rows])


def goodput(directory: str | Path) -> GoodputSummary:
    """Sums the time of the run in `directory`, from the start of its first process to the last line of its last one.

    Time within a process, and between two processes of one boot, is monotonic: changes of the wall clock have no
    effect. Between boots or machines the wall clock is used, and a jump back counts as no time.

    Raises:
        FileNotFoundError: when no `GoodputRecorder` wrote there.
    """
    path = Path(directory) / FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: a Trainer with directory= writes it, or a GoodputRecorder({str(directory)!r})"
        )
    sessions = [list(lines) for _, lines in itertools.groupby(_lines(path), key=lambda line: line["session"])]
    seconds: dict[str, float] = {}
    for line in itertools.chain.from_iterable(sessions):
        for name, value in line.get("seconds", {}).items():
            seconds[name] = seconds.get(name, 0.0) + value
    down = sum(_gap(a, b[0]) for a, b in itertools.pairwise(sessions))
    seconds |= {"down": down} if len(sessions) > 1 else {}
    order = {name: i for i, name in enumerate(NAMES)}
    ordered = dict(sorted(seconds.items(), key=lambda item: order.get(item[0], len(order))))
    return GoodputSummary(
        ordered, len(sessions), max((line.get("step", 0) for lines in sessions for line in lines), default=0)
    )


def _gap(before: list[dict[str, Any]], after: dict[str, Any]) -> float:
    same = after.get("boot") is not None and before[0].get("boot") == after["boot"]
    if same and "begin" in after:
        return max(0.0, after["begin"] - before[-1]["at"])
    return max(0.0, after["time"] - (after["at"] - after.get("begin", after["at"])) - before[-1]["time"])
