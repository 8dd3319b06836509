"""Waits until every process of a run has started, and reports those that have not."""

import contextlib
import re
import socket
import time
from collections.abc import Iterable

_HELLO = "maxlib roll call"
_WRONG = "wrong: "


def rendezvous(address: str, num_processes: int, process_id: int, *, timeout: float, rejoins: bool = False) -> None:
    """Waits until all processes of a run have started; process 0 listens at `address`, and frees it afterwards.

    Args:
        address: `host:port` of process 0.
        num_processes: Number of processes.
        process_id: Index of this process.
        timeout: Seconds to wait.
        rejoins: True if this process may come back to a run that goes on: if jax's service already answers at the
            address, nothing is waited for.

    Raises:
        TimeoutError: in every process that connected, with the indices of those that did not.
        ValueError: in a process whose index another process has, or that was started for a different number of
            processes.
        OSError: when process 0 cannot open the port.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _host(address, int(port), num_processes, deadline, timeout)
    else:
        _join(host.strip("[]"), int(port), address, process_id, num_processes, deadline, timeout, rejoins)


def _host(address: str, port: int, num_processes: int, deadline: float, timeout: float) -> None:
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(address, port))
        while len(came) < num_processes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                _receive(stack.enter_context(server.accept()[0]), came, num_processes)
        missing = set(range(1, num_processes)) - set(came)
        for caller in came.values():
            _answer(caller, _words(missing) or "go")
        if missing:
            raise TimeoutError(_late(missing, num_processes, address, timeout))


def _listen(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=1024, reuse_port=False)
    except OSError as error:
        raise OSError(
            error.errno,
            f"process 0 cannot listen at {address} ({error.strerror}): end the process that uses port {port}, perhaps "
            "one "
            "of an earlier run, or give all processes an address with another port",
        ) from error


def _receive(caller: socket.socket, came: dict[int, socket.socket], num_processes: int) -> None:
    """Registers a caller, or replies with an error."""
    number, count = _greeting(caller)
    if number is None:
        return
    if count != num_processes or not 0 < number < num_processes:
        _answer(caller, f"{_WRONG}process {number} of {count}, but this run has {num_processes}")
        return
    if number in came:  # it may have been restarted: the last one counts
        _answer(came[number], f"{_WRONG}another process {number} has connected: each process needs its own index")
    came[number] = caller


def _answer(caller: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        caller.sendall(text.encode())


def _greeting(caller: socket.socket) -> tuple[int | None, int]:
    """Reads a caller's index and its number of processes; no index if the caller is not a process of this protocol."""
    caller.settimeout(5)
    try:
        words = caller.recv(64).decode(errors="replace")
    except OSError:
        return None, 0
    match = re.fullmatch(rf"{_HELLO} (\d+) of (\d+)", words)
    return (int(match[1]), int(match[2])) if match else (None, 0)


def _join(
    host: str,
    port: int,
    address: str,
    process_id: int,
    num_processes: int,
    deadline: float,
    timeout: float,
    rejoins: bool,
) -> None:
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic())) as line:
                line.sendall(f"{_HELLO} {process_id} of {num_processes}".encode())
                line.settimeout(max(0.01, deadline + 5 - time.monotonic()))  # process 0 replies at its own deadline
                answer = line.recv(4096).decode(errors="replace")
        except OSError as error:
            reason, answer = str(error), ""
        if "\0" in answer:  # frames of gRPC: the run has started, or an earlier one has not ended
            if rejoins:
                return
            reason, answer = "another service answers there", ""
        if answer == "go":
            return
        if answer.startswith(_WRONG):
            raise ValueError(f"process {process_id} was rejected at {address}: {answer.removeprefix(_WRONG)}")
        if answer:
            raise TimeoutError(
                f"process {process_id} connected to {address}, but these did not within {timeout:g} s: {answer}"
            )
        time.sleep(0.1)
    raise TimeoutError(
        f"process {process_id} did not reach process 0 at {address} within {timeout:g} s ({reason}): is it running, is the "
        "address right, is its port reachable?"
    )


def _late(missing: Iterable[int], num_processes: int, address: str, timeout: float) -> str:
    return (
        f"{_words(missing)} of {num_processes} did not connect to {address} within {timeout:g} s: look into their "
        "logs, and check that they were started with this address and this number of processes"
    )


def _words(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    shown = ", ".join(map(str, listed[:20])) + (f" … ({len(listed)} in all)" if len(listed) > 20 else "")
    return f"process{'es' if len(listed) > 1 else ''} {shown}" if listed else ""
