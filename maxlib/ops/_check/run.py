"""The run of `check`: every case in a process that may hang or crash, and the table of what failed."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxlib._utils.timed_process import Failure, TimedProcess, wait_for_any
from maxlib.ops import _findings
from maxlib.ops._check.cases import CASES, OPS, Case
from maxlib.ops._check.compare import Job, compare, device, prepare

DEFINITIONS = ("reference", "sequential")
BROKEN = ("wrong", "varies", "hangs", "crashed")
"""Failures after which an implementation is no longer chosen. Running out of memory, or raising an error, does not
count: the caller sees the error.
"""
DEVICE, PREPARE, COMPARE = range(3)


def implementations(op: str) -> list[str]:
    """Returns the implementations of an operation to check: all but its definition."""
    return [kernel.name for kernel in OPS[op].kernels if kernel.name not in DEFINITIONS]


def check(
    names: Sequence[str] = (), *, deadline: float = 120.0, write: bool = True, cases: Mapping[str, Case] | None = None
) -> list[dict[str, Any]]:
    """Runs implementations of attention, grouped matmuls and recurrences and compares them with float32.

    An implementation that is wrong, differs from run to run, hangs or crashes is written to this device kind's table
    and no longer runs here. It is removed from the table when it passes again.

    Args:
        names: Names of the implementations to check; default: all.
        deadline: Time limit in seconds for each case, including compilation, and for the result to compare it with.
        write: True writes the results to the table.
        cases: Calls to run, by name; default: those of training, prefill and decoding, on an accelerator.

    Returns:
        One row per implementation and case: Op, implementation, case, status, error.

    Raises:
        ValueError: When no implementation has one of the names.
        RuntimeError: When JAX does not start, or runs on a CPU.
    """
    known = {name for op in OPS for name in implementations(op)}
    if unknown := set(names) - known:
        raise ValueError(f"unknown implementations {sorted(unknown)}; known are {sorted(known)}")
    process, rows = TimedProcess([device, prepare, compare]), []
    try:
        platform, kind = _called(process, DEVICE, None, deadline)[0] or ("", "")
        if not platform:
            raise RuntimeError("JAX does not start here")
        if platform == "cpu" and cases is None:
            raise RuntimeError("check needs a GPU or a TPU; on a CPU `pytest tests/ops` compares the kernels")
        print(f"{kind} ({platform})", flush=True)
        for case_name, case in (CASES if cases is None else cases).items():
            for name in implementations(case.op):
                if not names or name in names:
                    row = {"op": case.op, "implementation": name, "case": case_name}
                    rows.append(row | _row(process, (name, case), deadline))
                    _print(rows[-1])
                    if write and rows[-1]["status"] in BROKEN:  # at once: the command may be interrupted
                        _findings.write(kind, _verdicts(rows[-1:]))
    finally:
        process.end()
    if write:
        print(f"written to {_findings.write(kind, _verdicts(rows))}", flush=True)
    return rows


def _row(process: TimedProcess, job: Job, deadline: float) -> dict[str, Any]:
    row, failure = _called(process, PREPARE, job, deadline)
    if failure:  # the implementation has not run yet, so it is not to blame
        return {"status": "failed", "why": f"nothing to compare with: {_reason(failure, deadline)}"}
    if row is not None:
        return row
    row, failure = _called(process, COMPARE, job, deadline)
    if failure:
        return {"status": "hangs" if failure == "timeout" else "crashed", "why": _reason(failure, deadline)}
    return row


def _called(process: TimedProcess, function: int, argument: Any, deadline: float) -> tuple[Any, Failure | None]:
    """Returns the result of a function in the process, or why there is none."""
    while not process.idle:  # it has only started
        wait_for_any([process])
        process.result()
    process.start("call", function, argument, deadline)
    wait_for_any([process])
    answer = process.result()
    assert answer is not None  # which only a process that has just started gives
    return answer[1:]


def _reason(failure: Failure, deadline: float) -> str:
    return f"no result within {deadline:.0f} s" if failure == "timeout" else "the process ended"


def _verdicts(rows: list[dict[str, Any]]) -> dict[str, str | None]:
    """Returns the reason to refuse each implementation that ran, or None for one that passed."""
    verdicts: dict[str, str | None] = {}
    for row in rows:
        name = f"{row['op']}/{row['implementation']}"
        if row["status"] in BROKEN:
            verdicts[name] = f"{row['case']}: {row['why']}"
        elif row["status"] == "right":
            verdicts.setdefault(name, None)
    return verdicts


def _print(row: dict[str, Any]) -> None:
    name = f"{row['op']}/{row['implementation']}"
    words = [f"error {row['error']:.1e}"] if "error" in row else []
    words += [row["why"]] if "why" in row else []
    print(f"{name:<41} {row['case']:<18} {row['status']:<13} {'  '.join(words)}", flush=True)
