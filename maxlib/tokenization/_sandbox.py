"""Renders chat templates in a separate process, because they are untrusted."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.exceptions import SecurityError


class Sandbox:
    """A process that renders templates in jinja's immutable sandbox, with limits on time and memory.

    It starts at the first request, and again after a template exceeded a limit.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Any = None

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str | None],
        variables: Mapping[str, Any] | None,
        *,
        seconds: float,
    ) -> str:
        """Renders a template.

        Args:
            source: The template.
            special_tokens: Texts by name, such as `bos_token`; None for one that does not exist.
            variables: What else the template may name; None only compiles it.
            seconds: Maximum processor time.

        Raises:
            ValueError: It fails, takes longer than `seconds`, or takes too much memory.
            SecurityError: It reaches for Python's own names.
        """
        request = {"source": source, "special_tokens": special_tokens, "variables": variables, "seconds": seconds}
        data = json.dumps(request, default=_plain).encode()
        with self._lock:
            try:
                reply = json.loads(self._ask(data))
            except (EOFError, OSError):
                status = self.close()
                limit = f"took longer than {seconds:g} s: raise seconds=, or mend its loops"
                ended = limit if status == -signal.SIGPROF else f"ended its process with status {status}"
                raise ValueError(f"the chat template {ended}") from None
            except BaseException:  # the next request must not read the answer to this one
                self.close()
                raise
        if "security" in reply:
            raise SecurityError(reply["security"])
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"]

    def close(self) -> int | None:
        """Ends the process, and returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._connection.close()
        process.kill()
        return process.wait()

    def forget(self) -> None:
        """Leaves the process to the parent, after a fork."""
        if self._process is not None:
            self._connection.close()
            self._process.returncode = 0
        self.__init__()

    def _ask(self, request: bytes) -> bytes:
        if self._process is None:
            self._connection, theirs = Pipe()
            # In a session of its own, so that Ctrl-C does not reach it. -P: its folder has no modules to import.
            self._process = subprocess.Popen(
                [sys.executable, "-P", Path(__file__).with_name("_renderer.py"), str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
        self._connection.send_bytes(request)
        return self._connection.recv_bytes()


SANDBOX = Sandbox()
atexit.register(SANDBOX.close)
os.register_at_fork(after_in_child=SANDBOX.forget)


def _plain(value: Any) -> Any:
    """Converts what JSON does not have, as transformers does: a template never sees images and other objects."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # of pydantic
        return dump()
    if callable(value):
        raise ValueError(f"a chat template takes values such as the JSON schema of a tool, got {value!r}")
    return f"<{type(value).__name__}>"
