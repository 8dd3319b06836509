"""Kills `examples/pretrain.py` and measures how long its next step takes from there, part by part.

`python -m tests.training.restart --times 3`, on an idle machine. The caches are those of the killed run: compiled
programs and tokens.
"""

import argparse
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from maxlib.observability import read_jsonl

ROOT = Path(__file__).parents[2]
PARTS = ("process", "imports", "data", "state", "restore", "first batch", "program", "step")


def run(directory: Path, *words: str) -> subprocess.Popen:
    program = [sys.executable, *words, "--out", str(directory / "run"), "--steps", "50"]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(program, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def step_of(directory: Path) -> int:
    path = directory / "run" / "metrics.jsonl"
    return max((row["step"] for row in read_jsonl(path)), default=0) if path.exists() else 0


def kill_after(running: subprocess.Popen, directory: Path, step: int) -> float:
    """Kills the process once that step is done; returns the time of the kill."""
    while step_of(directory) < step:
        assert running.poll() is None
        time.sleep(0.2)
    running.send_signal(signal.SIGKILL)
    running.wait()
    return time.time()


def restart(directory: Path, begin: float) -> dict[str, float]:
    """Restarts the run, which ended at `begin`, and returns the seconds of each part until its first step is done."""
    running = run(directory, "-m", "tests.training.restart", "--marks")
    output = running.communicate(timeout=300)[0]
    marks = [line.split(maxsplit=2)[1:] for line in output.splitlines() if line.startswith("mark ")]
    ends = {name: float(at) for at, name in marks}
    assert list(ends) == list(PARTS), output
    seconds = {}
    for part, end in ends.items():
        seconds[part], begin = end - begin, end
    return seconds


def mark(part: str) -> None:
    print("mark", time.time(), part, flush=True)


def marked(owner: Any, name: str, part: str) -> None:
    """Lets the first call of a function mark the end of a part."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        setattr(owner, name, function)
        mark(part)
        return result

    setattr(owner, name, call)


def resumed() -> None:
    """Runs the example until its first step is done, and prints when each part ended."""
    mark("process")
    program = runpy.run_path(str(ROOT / "examples" / "pretrain.py"))
    mark("imports")
    import jax

    from maxlib import training
    from maxlib.training._step import CompiledStep

    start = CompiledStep.__call__

    def first_step(self: CompiledStep, state: Any, batch: Any) -> None:
        started = start(self, state, batch)
        mark("program")
        jax.block_until_ready(started)
        mark("step")
        os._exit(0)

    CompiledStep.__call__ = first_step  # pyright: ignore[reportAttributeAccessIssue]
    marked(program["main"].__globals__["data"], "Loader", "data")
    marked(training.Trainer, "__init__", "state")
    marked(training.Trainer, "restore", "restore")
    marked(training.Trainer, "_wait_for_batch", "first batch")
    program["main"]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, rows = Path(name), []
        ended = kill_after(run(directory, "examples/pretrain.py"), directory, 7)
        for _ in range(args.times + 1):
            rows.append(restart(directory, ended))
            ended = time.time()
        print(f"{'seconds':14}{'first':>8}{'median of ' + str(args.times):>16}")
        for part in PARTS:
            print(f"{part:14}{rows[0][part]:8.2f}{median(row[part] for row in rows[1:]):16.2f}")
        print(f"{'all':14}{sum(rows[0].values()):8.2f}{median(sum(row.values()) for row in rows[1:]):16.2f}")


if __name__ == "__main__":
    if "--marks" in sys.argv:
        sys.argv.remove("--marks")
        resumed()
    else:
        main()
