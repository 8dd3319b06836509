"""Parent process of `check` and `tune`: starts a worker per implementation, ends those that hang, and saves results."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlib.ops import _findings

BROKEN = ("wrong", "varies", "hangs", "crashed")
"""Failures after which an implementation is no longer chosen. Running out of memory, or raising an error, does not
count: the caller sees the error.
"""


def check(
    implementations: list[str] | None = None, *, deadline: float = 120.0, rounds: int = 5, write: bool = True
) -> list[dict[str, Any]]:
    """Runs implementations of attention, grouped matmuls and recurrences and compares them with float32.

    An implementation that is wrong, differs from run to run, hangs or crashes on an accelerator is written to this
    device kind's table and no longer runs here. It is removed from the table when it passes again.

    Args:
        implementations: Names of the implementations to check; default: all.
        deadline: Time limit in seconds for each case, including compilation, and for the result to compare it with.
        rounds: Number of rounds of ten timed calls.
        write: True writes the results to the table.

    Returns:
        One row per implementation and case: Op, implementation, case, status, error, rates.

    Raises:
        ValueError: When no implementation has one of the names.
        RuntimeError: When JAX does not start.
    """
    about = _described(deadline)
    if about["platform"] == "cpu":
        _say("No accelerator: sizes are small, TPU kernels run in an interpreter, GPU kernels are skipped, no times.")
    rows, writes, path = [], write and about["platform"] != "cpu", None
    for op, name in _known(about, implementations):
        if implementations is None or name in implementations:
            results = [{"op": op, "implementation": name} | row for row in _cases([op, name], deadline, rounds)]
            rows += results
            _table(results)
            # At once, so that what was found counts if the command is interrupted.
            path = _findings.write(about["device"], refused=_verdicts(results)) if writes else None
    if path is not None:
        _say(f"written to {path}")
    return rows


def tune(
    implementations: list[str] | None = None, *, deadline: float = 120.0, rounds: int = 5
) -> dict[str, dict[str, Any]]:
    """Tries tile sizes of every kernel that runs on this machine and writes the fastest to the device kind's table.

    Sizes whose result is not that of float32 are left out. Without an accelerator nothing is timed or written: kernels
    for TPUs run in an interpreter, which shows only that their sizes give the right result.

    Args:
        implementations: Names of those to try; default: all of them.
        deadline: Time limit per choice of sizes in seconds, including compilation.
        rounds: Rounds of ten timed calls.

    Returns:
        The fastest sizes by key: Kernel, lengths (as powers of two) and widths.

    Raises:
        ValueError: When a name is not that of an implementation.
        RuntimeError: When JAX does not start.
    """
    about = _described(deadline)
    _known(about, implementations)
    timed = about["platform"] != "cpu"
    if not timed:
        _say(
            "No accelerator: kernels for TPUs run in an interpreter; tiles are checked, not timed, and none is written."
        )
    best: dict[str, Any] = {}
    for row in _cases(["--tune", *(implementations or ())], deadline, rounds):
        _say(f"{row['case']}: {row['status']} {row.get('seconds', row.get('why', ''))}")
        if "seconds" in row and row["seconds"] < best.get(row["key"], row | {"seconds": float("inf")})["seconds"]:
            best[row["key"]] = row
    tiles = {key: row["tiles"] for key, row in best.items()}
    if timed:
        _say(f"written to {_findings.write(about['device'], tiles=tiles)}")
    return tiles


def _described(deadline: float) -> dict[str, Any]:
    """Returns the device and the implementations that a worker finds, and prints the device."""
    about, *_ = _lines(["--describe"], deadline)
    if "ended" in about:
        raise RuntimeError(f"JAX does not start here: {about['why']}")
    _say(f"{about['device']} ({about['platform']}), jax {about['jax']}")
    return about


def _known(about: dict[str, Any], wanted: list[str] | None) -> list[tuple[str, str]]:
    """Returns every operation and implementation; raises ValueError when a wanted one is not among them."""
    known = [(op, name) for op, names in about["implementations"].items() for name in names]
    if unknown := set(wanted or ()) - {name for _, name in known}:
        raise ValueError(f"unknown implementations {sorted(unknown)}; known are {sorted({name for _, name in known})}")
    return known


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


def _cases(arguments: list[str], deadline: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a row per case; a process that hangs or crashes is replaced by one that starts after that case."""
    done: list[str] = []
    while True:
        begun, finished = {}, False
        for line in _lines([*arguments, "--rounds", str(rounds), "--skip", json.dumps(done)], deadline):
            if "ended" in line:
                if finished:  # it ended badly, but has said everything
                    return
                yield _ended(begun, line)
                break
            finished |= "finished" in line
            if "case" in line:
                begun = {}
                yield line
            elif name := line.get("prepares") or line.get("begins"):
                begun = line
                done += [name] if name not in done else []  # the next process skips it
        else:
            return


def _ended(begun: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of the case during which a process ended.

    Raises:
        RuntimeError: When there was none.
    """
    if "begins" in begun:
        return {"case": begun["begins"], "status": line["ended"], "why": line["why"]}
    if "prepares" in begun:  # the implementation has not run yet, so it is not to blame
        return {"case": begun["prepares"], "status": "failed", "why": f"nothing to compare with: {line['why']}"}
    raise RuntimeError(f"a process of check ended while no case was running: {line['why']}")


def _lines(arguments: list[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Runs a worker and yields its lines; the last one is `{"ended": ...}` if it hangs or fails."""
    command = [sys.executable, "-m", "maxlib.ops", "worker", *arguments]
    env = os.environ | {_findings.IGNORE: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # The parent never uses a device, because only one process at a time can own a GPU's memory.
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    # Threads read both streams, so that a full pipe cannot block the worker, and the deadline works without output.
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    threading.Thread(target=_forward, args=(worker.stdout, lines.put), daemon=True).start()
    reader = threading.Thread(target=_forward, args=(worker.stderr, errors.append), daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=deadline)) is not None:
            if (message := _read(line)) is not None:
                yield message
        code = worker.wait(deadline)
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"ended": "hangs", "why": f"no result within {deadline:.0f} s"}
        return
    finally:
        if worker.poll() is None:
            _end(worker)
    if code:
        reader.join(5)
        last = next((line.strip() for line in reversed(errors) if line and line.strip()), "no message")
        yield {"ended": "crashed", "why": f"ended with status {code}: {last[:200]}"}


def _read(line: str) -> dict[str, Any] | None:
    """Reads a line of a worker's; None for one that a library printed."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _forward(stream, put) -> None:
    with stream:
        for line in stream:
            put(line)
    put(None)


def _end(worker: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _say(text: str) -> None:
    print(text, flush=True)


def _table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows of one implementation; skipped cases with the same reason share a line."""
    refused: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['op']}/{row['implementation']}"
        if row["status"] == "refused":
            refused.setdefault(row["why"], []).append(row["case"])
        else:
            _say(f"{name:<41} {row['case']:<18} {row['status']:<8} {_result(row)}")
    for why, cases in refused.items():
        which = f"{len(cases)} cases" if len(cases) > 3 else "; ".join(cases)
        _say(f"{rows[0]['op']}/{rows[0]['implementation']}: refuses {which}: {why}")


def _result(row: dict[str, Any]) -> str:
    words = [f"error {row['error']:.1e}"] if "error" in row else []
    words += [row["why"]] if "why" in row else []
    words += [f"({row['how']})"] if row.get("how") == "interpreted" else []
    words += [f"{row[name] / 1e12:7.1f} TFLOP/s" for name in ("forward_flops", "both_flops") if name in row]
    return "  ".join(words + ([f"{row['share']:.0%} of peak"] if "share" in row else []))


def save(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes one line of JSON per row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
