"""Whose a directory is: one run at a time, on any file system."""

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxlib import distributed
from maxlib.checkpoint._errors import InUseError

_log = logging.getLogger(__name__)
FILE = "owner.json"
BEAT = 15.0  # seconds between two signs of life


class Claim:
    """Holds `directory` for this process, until `release`, the end of the process or its death.

    A file says which process it is and changes every `BEAT` seconds. A process of the same machine is looked up; of
    another machine, three beats are waited for. No file system is trusted to lock: whoever finds another's name later
    gives way. `first`: this process did not hold it already, by another object.

    Raises:
      InUseError: another living process holds it.
    """

    def __init__(self, directory: epath.Path):
        self._file = directory / FILE
        leads = jax.process_index() == 0
        with distributed.main_process_first(f"whose {directory} is"):  # it may wait longer than a collective does
            error = self._take() if leads else None
        _agree(error, directory)
        _check_same(self._file)
        self.first = str(self._file) not in _held
        if leads:
            self.release = weakref.finalize(self, _release, self._file)  # at the latest when the process ends
            _held[str(self._file)] = _held.get(str(self._file), 0) + 1
            _beats()
        else:
            self.release = lambda: None

    def check(self) -> None:
        """Raises InUseError if another process has taken the directory over while this one seemed dead."""
        if jax.process_index() == 0 and (other := self._read()) is not None and not _mine(other):
            raise InUseError(
                f"{self._file.parent} was taken over by {_who(other)}, as this process gave no sign of life."
            )

    def _take(self) -> InUseError | None:
        other = self._read()
        if other is not None and not _mine(other):
            if self._lives(other):
                return InUseError(
                    f"{self._file.parent} is in use by {_who(other)}. Two runs would delete each other's steps: stop that one, "
                    "or use another directory (checkpoint.load reads this one without disturbing it)."
                )
            _log.info("%s is taken over from %s, which is dead.", self._file.parent, _who(other))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        _write(self._file)
        return None

    def _lives(self, other: dict[str, Any]) -> bool:
        if other["machine"] == _machine():
            return _began(other["pid"]) == other["began"]
        _log.warning("%s names %s: waiting %g s for a sign of life.", self._file, _who(other), 3 * BEAT)
        end = time.monotonic() + 3 * BEAT
        while time.monotonic() < end:
            time.sleep(min(1.0, BEAT / 4))
            now = self._read()
            if now is None or now["beat"] != other["beat"]:
                return now is not None
        return False

    def _read(self) -> dict[str, Any] | None:
        return _read(self._file)


_held: dict[str, int] = {}


def _release(file: epath.Path) -> None:
    _held[str(file)] -= 1
    if not _held[str(file)]:  # other objects of this process may hold it too
        del _held[str(file)]
        with contextlib.suppress(OSError):
            if (owner := _read(file)) is not None and _mine(owner):
                file.unlink()


@functools.cache
def _beats() -> threading.Thread:
    """One thread for all that this process holds."""
    thread = threading.Thread(target=_beat, daemon=True, name="maxlib-owner")
    thread.start()
    return thread


def _beat() -> None:
    while True:
        time.sleep(BEAT)
        for file in list(_held):
            with contextlib.suppress(OSError):
                if (owner := _read(epath.Path(file))) is not None and _mine(owner):
                    _write(epath.Path(file))


def _read(file: epath.Path) -> dict[str, Any] | None:
    for _ in range(3):
        try:
            return json.loads(file.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):  # it is being written
            time.sleep(0.05)
    return None


def _write(file: epath.Path) -> None:
    me = {"machine": _machine(), "pid": os.getpid(), "began": _began(os.getpid()), "host": socket.gethostname()}
    file.write_text(json.dumps(me | {"beat": uuid.uuid4().hex, "time": time.strftime("%Y-%m-%d %H:%M:%S")}))


def _mine(owner: dict[str, Any]) -> bool:
    return (owner["machine"], owner["pid"], owner["began"]) == (_machine(), os.getpid(), _began(os.getpid()))


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']} (last seen {owner['time']})"


@functools.cache
def _machine() -> str:
    """Names what process numbers mean something in: a host, one boot of it, a container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {uuid.getnode():x}"


def _began(pid: int) -> str | None:
    """When a process began, as numbers are given again; None if it does not run."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?"


def _agree(error: InUseError | None, directory: epath.Path) -> None:
    """Raises on all hosts or on none."""
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.array(error is not None)) and error is None:
        raise InUseError(f"{directory} is in use by another run; the first host says by which.")
    if error is not None:
        raise error


def _check_same(file: epath.Path, patience: float = 10.0) -> None:
    """Whether all hosts see one and the same file."""
    if jax.process_count() == 1:
        return
    end = time.monotonic() + patience  # network file systems may take a while
    while (owner := _read(file)) is None and time.monotonic() < end:
        time.sleep(0.2)
    mark = 0 if owner is None else zlib.crc32(f"{owner['machine']} {owner['pid']} {owner['began']}".encode())
    marks = np.ravel(multihost_utils.process_allgather(np.array(mark, np.uint32)))
    if others := np.flatnonzero(marks != marks[0]).tolist():
        raise ValueError(f"{file.parent} must be one directory for all hosts; the hosts {others} see another one.")
