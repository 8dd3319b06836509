"""Runs the compiler in a separate process and reads its files."""

import builtins
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.kernels.vector_memory import vmem_of
from maxlib.ops.trip_counts import TripCounts
from maxlib.plan._hlo import Costs, read_costs
from maxlib.plan._job import Job, to_json
from maxlib.plan._targets import parse_target

# Written when buffers are assigned, before generating machine code, which takes most of the time.
_ASSIGNED = {
    "tpu": "*jit_step*.after_optimizations_after_buffer_assignment.txt",
    "cuda": "*jit_step*after_optimizations-memory-usage-report.txt",
    "cpu": "",
}
_BUFFERS = "*jit_step*after_optimizations-buffer-assignment.txt"
_PROGRAM = "*jit_step*after_optimizations.txt"

_TAIL = 2000  # letters of the end of the compiler's output, for an error
_HOST = "5"


class Compiled(NamedTuple):
    """The compiler's results. Sizes are bytes on one device.

    Args:
        facts: Facts about the program, from `_worker.describe`.
        lower_seconds: Seconds of tracing and lowering.
        compile_seconds: Seconds of compiling.
        temporaries: Bytes of temporary buffers.
        code: Bytes of machine code; None if none was made.
        peak: Bytes at the worst moment.
        host: Bytes that the host stores for the device.
        costs: The work of a step; None if the program's text is missing.
    """

    facts: dict[str, Any]
    lower_seconds: float
    compile_seconds: float
    temporaries: float
    code: float | None
    peak: float
    host: float
    costs: Costs | None


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
    with tempfile.TemporaryDirectory(prefix="maxlib-plan-") as temporary:
        folder = Path(keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(f"{folder} must be an empty folder: the compiler's files go there")
        enough = "" if full else _ASSIGNED[parse_target(job.target).platform]
        command = [sys.executable, "-m", "maxlib.plan._worker", str(folder), str(os.getpid()), enough]
        environment = _environment(job.target)
        try:
            done = subprocess.run(
                command, env=environment, input=to_json(job), capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"compiling for {job.target} took more than {timeout:g} s") from None
        ended = time.time()
        results = folder / "maxlib.json"
        stages = json.loads(results.read_text()) if results.exists() else {}
        failed = stages.get("failed")
        if failed and "RESOURCE_EXHAUSTED" not in failed["message"]:
            raise getattr(builtins, failed["kind"], RuntimeError)(failed["message"]) from RuntimeError(failed["trace"])
        if not failed and "compiled" not in stages and not (enough and any(folder.glob(enough))):
            raise RuntimeError(_last_words(done, list(stages)))
        return _read(job, stages, folder, ended)


def _last_words(done: subprocess.CompletedProcess[str], stages: list[str]) -> str:
    """Returns an error message for a process that ended without a result."""
    killed = ": killed, most often by the system when memory runs out" if done.returncode == -9 else ""
    where = f"after it had {stages[-1]} the step" if stages else "before it had described the step"
    said = done.stderr.strip()[-_TAIL:] or "nothing"
    return f"the compiler's process ended with code {done.returncode}{killed}, {where}, and said at last:\n{said}"


def _environment(target: str) -> dict[str, str]:
    """Returns the environment of the compiler's process for a target; libtpu aborts on flags that only CPUs have."""
    flags, paths = os.environ.get("XLA_FLAGS", "").split(), os.pathsep.join(path for path in sys.path if path)
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    if flags and parse_target(target).platform == "tpu":
        variables["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith("--xla_cpu_"))
    return WITHOUT_TPU | dict(os.environ) | variables


def _read(job: Job, stages: dict[str, dict[str, Any]], folder: Path, ended: float) -> Compiled:
    """Reads the results of a process that ended at the time `ended`, perhaps because there were enough."""
    facts, lowered, compiled = (stages.get(stage, {}) for stage in ("described", "lowered", "compiled"))
    analytic = facts["analytic"]
    arguments, temporaries, host = _assigned(folder)
    arguments = compiled.get("arguments", arguments) or sum(analytic[n] for n in ("parameters", "optimizer", "batch"))
    temporaries = compiled.get("temporaries", temporaries)
    if (needed := _needed(stages.get("failed", {}).get("message", ""), arguments)) is not None:
        temporaries = needed
    return Compiled(
        facts,
        lower_seconds=lowered.get("seconds", 0.0),
        compile_seconds=compiled.get("seconds", ended - lowered.get("at", ended)),
        temporaries=temporaries,
        code=compiled.get("code"),
        peak=compiled.get("peak") or arguments + temporaries,
        host=compiled.get("host", host) or facts["host"],
        costs=_costs(job, folder, facts["mesh"], lowered.get("trips", {})),
    )


def _assigned(folder: Path) -> tuple[float, float, float]:
    """Returns the assigned bytes of arguments and of temporaries in main memory, and of both in the host's."""
    # Allocations in other memories than the main one have a color; the host's is 5.
    text = next((path.read_text() for path in folder.glob(_BUFFERS)), "")
    kinds = re.findall(r"^allocation \d+: size (\d+), (?:color (\d+), )?(.*)$", text, re.MULTILINE)

    def total(color, *words):
        return float(sum(int(size) for size, of, kind in kinds if of == color and any(word in kind for word in words)))

    return total("", "parameter "), total("", "preallocated-temp"), total(_HOST, "parameter ", "preallocated-temp")


def _needed(message: str, arguments: float) -> float | None:
    """Reads the bytes of temporaries from an error, "Used 107.3G of 95.74G hbm", which counts the arguments, or "total
    memory required for HLO temporaries (133.84G)", which does not. Returns None for other errors.
    """
    for pattern, others in ((r"Used ([\d.]+)([KMGT]) of", arguments), (r"temporaries \(([\d.]+)([KMGT])\)", 0.0)):
        if match := re.search(pattern, message):
            return float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1) - others
    return None


def _costs(job: Job, folder: Path, mesh: dict[str, int], trips: TripCounts) -> Costs | None:
    paths = [*folder.glob("text"), *folder.glob(_PROGRAM)]
    across = tuple(axis for axis, degree in job.dcn.items() if degree != 1)
    chip = parse_target(job.target).chip
    if not paths:
        return None
    return read_costs(
        paths[0].read_text(), mesh, across=across, trips=trips, cache=chip.cache / 4, vmem=vmem_of(chip.kind)
    )
