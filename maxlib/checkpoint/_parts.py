"""Files of the shards that each process saved, on this host's disk and on those of its peers.

Every process serves its directory over HTTP to the others of its run, which present a common random secret.
"""

import collections
import dataclasses
import functools
import hmac
import http.client
import http.server
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax

from maxlib import distributed
from maxlib.checkpoint._errors import DamagedError

T = TypeVar("T")
ReadRange = Callable[[int, int], bytes]  # (start, size) of a part

_TIMEOUT = 60.0  # seconds without a byte after which a transfer fails
_CHUNK = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True, order=True)
class Part:
    """The shards that one process saved at one step; its text is a path, `step-run/process-of-processes`.

    Attributes:
        step: Number of the step.
        run: Token of the history that saved it; a later one, after a restart or a restore, has a greater token.
        process: Process that saved it.
        processes: Number of processes then, which is the number of parts.
    """

    step: int
    run: str
    process: int
    processes: int

    def __str__(self) -> str:
        return f"{self.step}-{self.run}/{self.process}-of-{self.processes}"

    @staticmethod
    def parse(text: str) -> "Part | None":
        """Reads the path of a part; None for any other path."""
        match = re.fullmatch(r"(\d+)-([0-9a-f]+)/(\d+)-of-(\d+)", text)
        return Part(int(match[1]), match[2], int(match[3]), int(match[4])) if match else None


class PartStore:
    """Parts on this host's disk, with access to those of all processes. All processes must create it.

    Args:
        directory: Directory on this host, created if it does not exist.
        peers: Number of other processes that get a copy of this process's parts; those on other hosts come first.

    Attributes:
        run: Token of this history.
        holders: Processes that have each part, as of the last `refresh`.
    """

    def __init__(self, directory: Path, peers: int):
        self.directory = directory
        self.holders: dict[Part, list[int]] = {}
        with distributed.raise_on_all(f"creating {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
        self._server = _Server(self) if jax.process_count() > 1 else None
        mine = {"secret": secrets.token_hex(16), "host": socket.gethostname(), "address": _address()}
        mine |= {"port": self._server.server_port if self._server else 0}
        self._processes = distributed.allgather_json(mine)
        self.secret = self._processes[0]["secret"]
        self.peers = peers_of(jax.process_index(), [process["host"] for process in self._processes])[:peers]
        if self._server is not None:  # only now, because it needs the secret
            threading.Thread(target=self._server.serve_forever, name="maxlib-parts", daemon=True).start()
        self.run = ""
        self.refresh()
        self.begin_run()

    def begin_run(self) -> None:
        """Takes a new token, so that steps saved from now on are not mixed with those of an earlier history."""
        newest = max((int(part.run, 16) for part in self.holders), default=0)
        mine = max(time.time_ns(), newest + 1, int(self.run or "0", 16) + 1)
        self.run = distributed.allgather_json(f"{mine:016x}")[0]

    def refresh(self) -> None:
        """Asks all processes which parts they have."""
        holders = collections.defaultdict(list)
        for process, names in enumerate(distributed.allgather_json([str(part) for part in self.held()])):
            for part in filter(None, map(Part.parse, names)):
                holders[part].append(process)
        self.holders = dict(holders)

    def complete(self) -> dict[int, list[Part]]:
        """Returns the parts of each step of which every part exists, from the newest history that has it."""
        saves = collections.defaultdict(list)
        for part in sorted(self.holders):
            saves[part.step, part.run, part.processes].append(part)
        return {step: parts for (step, _, processes), parts in saves.items() if len(parts) == processes}

    def held(self) -> list[Part]:
        """Lists the parts on this host's disk."""
        names = (f"{file.parent.name}/{file.name}" for file in self.directory.glob("*/*"))
        return sorted(filter(None, map(Part.parse, names)))

    def write(self, part: Part, chunks: Iterable[Any]) -> None:
        """Writes a part on this host, from buffers of bytes; it appears there all at once."""
        path = self.directory / str(part)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
        try:
            with unfinished.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def copy(self, part: Part) -> None:
        """Sends a part on this host to the peers. Raises OSError."""
        for peer in self.peers:
            with (self.directory / str(part)).open("rb") as file:
                size = str(os.fstat(file.fileno()).st_size)
                self._request(peer, "PUT", str(part), body=file, headers={"Content-Length": size})

    def read(self, part: Part, take: Callable[[ReadRange], T]) -> T:
        """Returns what `take` reads of a part: from this host's copy if it is intact, else from another host's.

        Args:
            part: The part.
            take: Function of `read_range(start, size)`; it raises DamagedError if the bytes are not what was written.

        Raises:
            OSError: When no process has an intact copy.
        """
        here = jax.process_index()
        problems = []
        for holder in sorted(self.holders.get(part, ()), key=lambda process: process != here):
            try:
                return take(functools.partial(self._read_range, holder, part))
            except (OSError, http.client.HTTPException, DamagedError) as error:
                problems.append(f"process {holder}: {error}")
        raise OSError(f"{part} cannot be read from any process: {'; '.join(problems) or 'none has it'}")

    def delete_others(self, step: int) -> None:
        """Deletes what is older than `step` of this history, and all parts of earlier ones."""
        for directory in self.directory.glob("*-*"):
            number, _, run = directory.name.partition("-")
            if number.isdecimal() and (run != self.run or int(number) < step):
                shutil.rmtree(directory, ignore_errors=True)  # another process of this host may be deleting it too

    def close(self) -> None:
        """Stops serving this host's parts."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def read_here(self, part: Part, start: int, size: int) -> bytes:
        """Reads a range of this host's copy of a part."""
        with (self.directory / str(part)).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def _read_range(self, holder: int, part: Part, start: int, size: int) -> bytes:
        if holder == jax.process_index():
            return self.read_here(part, start, size)
        return self._request(holder, "GET", f"{part}?{start}-{size}")

    def _request(self, process: int, method: str, path: str, *, body: Any = None, headers: Any = None) -> bytes:
        target = self._processes[process]
        connection = http.client.HTTPConnection(target["address"], target["port"], timeout=_TIMEOUT)
        try:
            connection.request(method, f"/{path}", body=body, headers={"Authorization": self.secret, **(headers or {})})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"{method} {path} was answered with {response.status} {response.reason}")
        return data


def peers_of(process: int, hosts: list[str]) -> list[int]:
    """Orders the other processes by how well they suit as peers: on other hosts, the next ones, in the same place of
    their host, so that the copies of a host's processes are spread over those of the next host.
    """
    places = [hosts[:i].count(host) for i, host in enumerate(hosts)]

    def key(other: int) -> tuple[bool, bool, int]:
        return hosts[other] == hosts[process], places[other] != places[process], (other - process) % len(hosts)

    return sorted((other for other in range(len(hosts)) if other != process), key=key)


def _address() -> str:
    """Returns this host's address as other hosts reach it: on the way to jax's coordinator, or the coordinator's."""
    from jax._src import distributed as state  # used by orbax too; it is not public

    coordinator = str(state.global_state.coordinator_address or "localhost:1")
    host = coordinator.rpartition(":")[0].strip("[]")
    if jax.process_index() == 0:
        return host
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(target)
        return probe.getsockname()[0]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, store: PartStore):
        self.store = store
        super().__init__(("", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers `GET /part?start-size` and `PUT /part`, and nothing else."""

    server: _Server
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        if (part := self._asked()) is None:
            return
        start, _, size = self.path.partition("?")[2].partition("-")
        try:
            data = self.server.store.read_here(part, int(start), int(size))
        except (OSError, ValueError) as error:
            self.send_error(404, str(error))
        else:
            self._answer(data)

    def do_PUT(self) -> None:
        if (part := self._asked()) is None:
            return
        try:
            self.server.store.write(part, self._chunks())
        except OSError as error:
            self.send_error(507, str(error))
        else:
            self._answer(b"")

    def _asked(self) -> Part | None:
        """Returns the requested part; refuses a request without the secret, or for any other path."""
        part = Part.parse(self.path.partition("?")[0].removeprefix("/"))
        allowed = hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.store.secret.encode())
        if part is None or not allowed:
            self.send_error(404 if allowed else 403)
            return None
        return part

    def _chunks(self) -> Iterable[bytes]:
        left = int(self.headers["Content-Length"])
        while left:
            chunk = self.rfile.read(min(left, _CHUNK))
            if not chunk:
                raise OSError("the connection ended early")
            left -= len(chunk)
            yield chunk

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""
