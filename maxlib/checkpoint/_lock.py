"""The lock of a run's directory, so that only one run writes at a time, on any file system. See docs/decisions.md."""

import collections
import contextlib
import json
import logging
import os
import socket
import time
import uuid
import weakref
import zlib
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from maxlib import distributed

_log = logging.getLogger(__name__)
FILE = "owner.json"
_RUN = uuid.uuid4().hex  # one token for all locks of this process


class RunLock:
    """Fencing token of this process in `directory`, until `release()` or the end of the process.

    `owner.json` has the token of the run that opened the directory last. This does not rely on file locks or on
    checking whether processes are alive: the newest run owns the directory, and an older run stops at its next save,
    when it finds another token (`taken`).

    Args:
        directory: The run's directory; created if it does not exist. All hosts must see the same one.

    Attributes:
        first: True if no other object of this process holds the directory.

    Raises:
        ValueError: When the hosts see different directories.
    """

    def __init__(self, directory: epath.Path):
        self._file = directory / FILE
        self.first = not _held[str(self._file)]
        self._leads = jax.process_index() == 0
        with distributed.raise_on_all(f"opening {directory}"):
            if self._leads:
                self._take()
        _check_same(self._file)
        _held[str(self._file)] += 1
        self.release = weakref.finalize(self, _release, self._file, self._leads)  # at the latest when the process ends

    def taken(self) -> str | None:
        """Describes the run that has since opened the directory, on the first host; None if there is none.

        Raises:
            OSError: When the record cannot be read.
        """
        if not self._leads or not self._file.parent.is_dir():  # writing will raise a clear error
            return None
        owner = _read(self._file)
        if _is_mine(owner):
            return None
        who = "another run, which has ended" if owner is None else _describe(owner)
        return (
            f"{self._file.parent} was taken over by {who}. This run has not saved since: stop one of the two, or "
            "give each a directory of its own."
        )

    def _take(self) -> None:
        owner = _read(self._file)
        if owner is not None and not _is_mine(owner):
            _log.warning(
                "%s is taken over from %s, which did not release it. If that run is still alive, it stops at its next "
                "save.",
                self._file.parent,
                _describe(owner),
            )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        me = {"run": _RUN, "pid": os.getpid(), "host": socket.gethostname()}
        self._file.write_text(json.dumps(me | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}))


_held: collections.Counter[str] = collections.Counter()


def _release(file: epath.Path, leads: bool) -> None:
    """Removes the file when this process's last lock object is deleted."""
    _held[str(file)] -= 1
    if leads and not _held[str(file)]:
        with contextlib.suppress(OSError):
            if _is_mine(_read(file)):
                file.unlink()


def _read(file: epath.Path, tries: int = 3) -> dict[str, Any] | None:
    """Reads the owner's record; None if there is none, empty if it is invalid. Raises OSError if it cannot be read."""
    for left in reversed(range(tries)):
        try:
            record = json.loads(file.read_text())
            return record if isinstance(record, dict) else {}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # it may be in the middle of a write
            if not left and isinstance(error, OSError):
                raise
            if left:
                time.sleep(0.05)
    return {}


def _is_mine(owner: dict[str, Any] | None) -> bool:
    return owner is not None and (owner.get("run"), owner.get("pid")) == (_RUN, os.getpid())


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} (since {owner.get('since', '?')})"


def _check_same(file: epath.Path, patience: float = 10.0) -> None:
    """Raises ValueError unless all hosts see the same file."""
    if jax.process_count() == 1:
        return
    end = time.monotonic() + patience  # network file systems may take a while
    while not (owner := _read(file)) and time.monotonic() < end:
        time.sleep(0.2)
    mark = zlib.crc32(str(owner.get("run")).encode()) if owner else 0
    marks = np.ravel(multihost_utils.process_allgather(np.array(mark, np.uint32)))
    if others := np.flatnonzero(marks != marks[0]).tolist():
        raise ValueError(f"{file.parent} must be one directory for all hosts; the hosts {others} see another one.")
