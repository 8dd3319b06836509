"""Supervises a run of several processes on this machine: if one dies, it ends the others and restarts the run.

Across machines SLURM's requeue and a JobSet's failure policy do this; see docs/guides/launch.md.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LOCK, JOURNAL = "launch.lock", "launch.jsonl"
_ON_REQUEST = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # after saving, as the others do
_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_EXIT_ON_ERROR = {"MAXLIB_EXIT_ON_ERROR": "1"}  # read by `initialize`; importing it here would import jax


class LockedError(RuntimeError):
    """Error: another launcher runs in this directory."""


def launch(
    command: Sequence[str], directory: Path, *, processes: Sequence[int], retries: int = 1, grace: float = 10.0
) -> int:
    """Runs `command` as several processes until all of them succeed.

    SIGTERM and Ctrl-C are passed on, so that the run saves and ends; a second one kills it.

    Args:
        command: The command of each process.
        directory: The run's directory, for a lock and a journal; the steps in its `metrics.jsonl` show whether it makes
            progress.
        processes: Number of processes to start, and smaller numbers to use if one does not come back.
        retries: Consecutive restarts without progress before the next number is tried.
        grace: Seconds for the other processes to end by themselves after one has died.

    Returns:
        The status to exit with.

    Raises:
        LockedError: when another launcher, or one of its remaining processes, uses `directory`.
        ValueError: when the numbers are not valid.
    """
    _check(processes, retries)
    for count in processes:
        _share(count, 0)  # raises now rather than later
    with _locked(directory) as lock, _signals() as asked:
        best, ended = furthest(directory), None
        for count in processes:
            failures = 0
            while failures <= retries:
                ended = _Attempt(command, directory, count, lock, grace).run(asked)
                reached = furthest(directory)
                _note(directory, event="end", step=reached, **dataclasses.asdict(ended))
                if ended.process is None or asked:
                    return 128 + asked[0] if asked else 0
                failures = 0 if reached > best else failures + 1
                best = max(best, reached)
                _log(f"{ended} after step {max(reached, 0)}")
        assert ended is not None
        _log(f"giving up: {retries + 1} consecutive starts made no progress beyond step {max(best, 0)}")
        return ended.exit_status


def furthest(directory: Path) -> int:
    """Returns the last step in `metrics.jsonl`, -1 if there is none."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().splitlines()
    return max((step for step in map(_step, lines) if step is not None), default=-1)


def _step(line: bytes) -> int | None:
    """Reads the step of a line; None for a truncated line."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of an attempt: `process` is the first that failed, None if all succeeded."""

    process: int | None = None
    status: int = 0

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with {self.status}"
        return f"process {self.process} {how}"

    @property
    def exit_status(self) -> int:
        return 128 - self.status if self.status < 0 else self.status


class _Attempt:
    """One start of all processes."""

    def __init__(self, command: Sequence[str], directory: Path, count: int, lock: int, grace: float):
        self._grace, self._deadline = grace, float("inf")
        base = {name: value for name, value in os.environ.items() if name not in _ADDRESSES}
        if count > 1:
            base |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "JAX_NUM_PROCESSES": str(count)}
            base |= _EXIT_ON_ERROR

        def start(i):
            return subprocess.Popen(
                command,
                env=base | ({"JAX_PROCESS_ID": str(i)} if count > 1 else {}) | _share(count, i),
                pass_fds=[lock],  # held while any of them lives, even if the launcher is killed
                start_new_session=True,  # Ctrl-C only reaches the launcher
            )

        self.children = [start(i) for i in range(count)]
        _note(directory, event="start", processes=count, pids=[child.pid for child in self.children])
        _log(f"{count} process{'es' if count > 1 else ''}: {' '.join(command)}")

    def run(self, asked: list[int]) -> Ended:
        """Waits for all processes to end. Kills those still running after the grace period, or at a second signal."""
        ended, told = Ended(), False
        try:
            while any(child.poll() is None for child in self.children):
                if ended.process is None:
                    ended = self._first_failure()
                    if ended.process is not None and ended.status not in _ON_REQUEST and not asked:
                        self._deadline = time.monotonic() + self._grace
                if asked and not told:
                    told = True
                    self._send(signal.SIGTERM)
                if time.monotonic() > self._deadline or len(asked) > 1:
                    self._send(signal.SIGKILL)
                time.sleep(0.1)
        finally:
            self._send(signal.SIGKILL)
            for child in self.children:
                child.wait()
        return ended if ended.process is not None else self._first_failure()

    def _first_failure(self) -> Ended:
        """Finds the process that failed first: a killed process comes before one that ended because of it."""
        bad = [(child.returncode >= 0, i) for i, child in enumerate(self.children) if child.poll()]
        return Ended(min(bad)[1], self.children[min(bad)[1]].returncode) if bad else Ended()

    def _send(self, number: int) -> None:
        """Sends a signal to each process and its children."""
        for child in self.children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)


def _check(processes: Sequence[int], retries: int) -> None:
    falling = all(a > b for a, b in itertools.pairwise(processes))
    if not processes or min(processes) < 1 or not falling or retries < 0:
        raise ValueError(
            "processes must be decreasing numbers of at least 1, such as 4,2,1, and retries at least 0; got "
            f"{list(processes)} and {retries}"
        )


def _share(count: int, process: int) -> dict[str, str]:
    """Gives one process an equal part of the GPUs in CUDA_VISIBLE_DEVICES, if that is set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed else []
    if len(devices) % count:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={listed} does not divide over {count} processes")
    each = len(devices) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[process * each :][:each])} if devices else {}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Locks the directory. Yields the lock's file descriptor; processes that inherit it hold the lock too."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise LockedError(
                f"{directory} is locked by {file.read() or 'another launcher'}, or by processes that it started; end "
                f"those first (their numbers are in {directory / JOURNAL}), or use another directory"
            ) from None
        file.truncate(0)
        file.write(f"the launcher with process number {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file.fileno()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the numbers of received signals that ask the run to end."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _note(directory: Path, **line: Any) -> None:
    with (directory / JOURNAL).open("a") as file:
        file.write(json.dumps({"time": time.time(), **line}) + "\n")


def _log(text: str) -> None:
    print(f"maxlib launch: {text}", flush=True)
