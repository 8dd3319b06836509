"""Runs the compiler in a separate process and reads its files."""

import builtins
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.kernels.vector_memory import vmem_of
from maxlib.ops.trip_counts import TripCounts
from maxlib.plan._hlo import Costs, read_costs
from maxlib.plan._job import MARK, Job, to_json
from maxlib.plan._targets import parse_target

# Written when buffers are assigned, before generating machine code, which takes most of the time.
_ASSIGNED = {
    "tpu": "*jit_step*.after_optimizations_after_buffer_assignment.txt",
    "cuda": "*jit_step*after_optimizations-memory-usage-report.txt",
    "cpu": "never",
}
_BUFFERS = "*jit_step*after_optimizations-buffer-assignment.txt"
_PROGRAM = "*jit_step*after_optimizations.txt"


_TAIL = 2000  # bytes of the end of the compiler's output, for an error
_HOST = "5"
ON_DEVICE = ("parameters", "optimizer", "batch")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's results. Sizes are bytes on one device.

    Args:
        described: Facts about the program, from `_worker.describe`.
        lower_seconds: Seconds of tracing and lowering.
        compile_seconds: Seconds of compiling.
        arguments: Bytes of the step's arguments.
        temporaries: Bytes of temporary buffers.
        code: Bytes of machine code; None if none was made.
        peak: Bytes at the worst moment.
        host: Bytes that the host stores for the device.
        costs: The work of a step; None if the program's text is missing.
        exceeded: The compiler's message if the memory was too small.
    """

    described: dict[str, Any]
    lower_seconds: float
    compile_seconds: float
    arguments: float
    temporaries: float
    code: float | None
    peak: float
    host: float
    costs: Costs | None
    exceeded: str | None


def run(job: Job, *, full: bool = False, keep: str | Path | None = None, timeout: float = 3600) -> Compiled:
    """Compiles in another process until buffers are assigned, or to the end with `full`.

    Args:
        job: The training step and its target.
        full: True also generates machine code.
        keep: An empty folder for the compiler's files.
        timeout: Time limit of the process in seconds.

    Raises:
        ValueError: when `keep` is not empty.
        TimeoutError: after `timeout` seconds.
        Exception: any exception of the other process.
    """
    with tempfile.TemporaryDirectory(prefix="maxlib-plan-") as folder:
        dump = Path(keep or folder)
        dump.mkdir(parents=True, exist_ok=True)
        if any(dump.iterdir()):
            raise ValueError(f"{dump} must be an empty folder: the compiler's files go there")
        news, seconds = _listen(job, dump, full, timeout)
        if "failed" in news and "RESOURCE_EXHAUSTED" not in news["failed"]["message"]:
            _raise(news["failed"])
        return _read(job, news, dump, seconds)


def _listen(job: Job, dump: Path, full: bool, timeout: float) -> tuple[dict[str, dict[str, Any]], float]:
    """Runs the process; returns its messages by stage, and the seconds that it compiled."""
    news: dict[str, dict[str, Any]] = {}
    began, assigned = time.monotonic(), _ASSIGNED[parse_target(job.target).platform]
    command = [sys.executable, "-m", "maxlib.plan._worker", str(dump), str(os.getpid())]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, env=_environment(job.target), stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin and process.stdout
        process.stdin.write(to_json(job))
        process.stdin.close()
        reader = threading.Thread(target=_collect, args=(process.stdout, news), daemon=True)
        reader.start()
        try:
            if not _waited(process, timeout, lambda: not full and any(dump.glob(assigned))):
                raise TimeoutError(f"compiling for {job.target} took more than {timeout:g} s; it was at {[*news][-1:]}")
        finally:
            process.kill()  # also if somebody interrupts; does nothing if it has ended
        reader.join(timeout=10)
        if not news or ("compiled" not in news and "failed" not in news and not any(dump.glob(assigned))):
            raise RuntimeError(_ended(process.returncode, list(news), errors))
    since = news.get("lowered", {}).get("at", began)
    return news, news.get("compiled", {}).get("seconds", time.monotonic() - since)


def _waited(process: subprocess.Popen[str], timeout: float, enough: Callable[[], bool]) -> bool:
    """Waits for the process to end, or to write `enough`; returns False after `timeout` seconds."""
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        if enough():
            time.sleep(1)  # the last files of that moment
            return True
        time.sleep(0.2)
    return process.poll() is not None


def _ended(code: int, stages: list[str], errors: IO[bytes]) -> str:
    """Returns an error message for a process that ended without a result."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
    said = errors.read().decode(errors="replace").strip()
    killed = ": killed, most often by the system when memory runs out" if code == -9 else ""
    where = f"after it had {stages[-1]} the step" if stages else "before it had described the step"
    return f"the compiler's process ended with code {code}{killed}, {where}, and " + (
        f"said at last:\n{said}" if said else "said nothing"
    )


def _environment(target: str) -> dict[str, str]:
    """Returns the environment of the compiler's process for a target; libtpu aborts on flags that only CPUs have."""
    flags, paths = os.environ.get("XLA_FLAGS", "").split(), os.pathsep.join(path for path in sys.path if path)
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    if flags and parse_target(target).platform == "tpu":
        variables["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith("--xla_cpu_"))
    return WITHOUT_TPU | dict(os.environ) | variables


def _collect(stream: Any, news: dict[str, dict[str, Any]]) -> None:
    for line in stream:
        if line.startswith(MARK):
            said = json.loads(line.removeprefix(MARK))
            news[said.pop("stage")] = said | {"at": time.monotonic()}


def _raise(failed: dict[str, Any]) -> None:
    kind = getattr(builtins, failed["kind"], RuntimeError)
    raise kind(failed["message"]) from RuntimeError(failed["trace"])


def _read(job: Job, news: dict[str, dict[str, Any]], dump: Path, seconds: float) -> Compiled:
    described, lowered, compiled = (news.get(stage, {}) for stage in ("described", "lowered", "compiled"))
    arguments, temporaries, host = _assigned(dump)
    arguments = compiled.get("arguments", arguments) or sum(described["bytes"][name] for name in ON_DEVICE)
    temporaries = compiled.get("temporaries", temporaries)
    exceeded = news.get("failed", {}).get("message")
    if exceeded and (used := _used(exceeded)):
        temporaries = used - arguments
    peak = compiled.get("peak") or arguments + temporaries
    return Compiled(
        described,
        lowered.get("seconds", 0.0),
        seconds,
        arguments,
        temporaries,
        compiled.get("code"),
        peak,
        compiled.get("host", host) or described["bytes"]["host"],
        _costs(job, dump, described["mesh"], lowered.get("trips", {})),
        exceeded,
    )


def _assigned(dump: Path) -> tuple[float, float, float]:
    """Returns the assigned bytes of arguments and of temporaries in main memory, and of both in the host's."""
    # Allocations in other memories than the main one have a color; the host's is 5.
    text = next((path.read_text() for path in dump.glob(_BUFFERS)), "")
    kinds = re.findall(r"^allocation \d+: size (\d+), (?:color (\d+), )?(.*)$", text, re.MULTILINE)

    def total(color, *words):
        return float(
            sum(
                int(size)
                for size, allocation, kind in kinds
                if allocation == color and any(word in kind for word in words)
            )
        )

    return total("", "parameter "), total("", "preallocated-temp"), total(_HOST, "parameter ", "preallocated-temp")


def _used(message: str) -> float | None:
    """Reads the bytes from a message such as "Used 107.3G of 95.74G hbm"."""
    match = re.search(r"Used ([\d.]+)([KMGT]) of", message)
    return float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1) if match else None


def _costs(job: Job, dump: Path, mesh: dict[str, int], trips: TripCounts) -> Costs | None:
    paths = [*dump.glob("text"), *dump.glob(_PROGRAM)]
    across = tuple(axis for axis, degree in job.dcn.items() if degree != 1)
    chip = parse_target(job.target).chip
    on_chip: Any = {"cache": chip.cache / 4, "vmem": vmem_of(chip.kind)}
    return read_costs(paths[0].read_text(), mesh, across=across, trips=trips, **on_chip) if paths else None
