"""Kills a training run repeatedly, in every phase, and compares its end with an uninterrupted run.

`nox -s kill -- --times 200` or `python -m tests.training.kill --times 200`. A run is killed until it is done; then its
parameters and moments, its exports and its metrics must be those of the untouched run, bit for bit, its log must know
of no damage, and its goodput must account for its time. Processes are forked from one that has imported everything,
which is what makes it quick.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import jax

from maxlib import checkpoint, observability, weights
from maxlib.observability import read_jsonl
from tests.training import killable
from tests.training.killable import MOMENTS, Plan


def fork(directory: Path, plan: Plan | None) -> tuple[int, list[str] | None, str]:
    """Runs on in a new process: returns its exit, the phase in which it was killed, and its output."""
    reading, writing = os.pipe()
    status, said = apart(directory, lambda: killable.run(directory, plan, writing))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        doing = pipe.read()
    return status, json.loads(doing) if doing else None, said


def apart(directory: Path, call: Callable[[], Any]) -> tuple[int, str]:
    """Calls in a new process, because this one must never start jax's threads; returns its status and the output in
    `log.txt`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / "log.txt", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(log).st_size
    if (child := os.fork()) == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        _exit_with(call)
    _, status = os.waitpid(child, 0)
    said = os.pread(log, 1 << 24, size).decode()
    os.close(log)
    return os.waitstatus_to_exitcode(status), said


def _exit_with(call: Callable[[], Any]) -> None:
    status = 1
    try:
        call()
        status = 0
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Kills:
    """Plans kills evenly over all phases, and counts the kills of each."""

    def __init__(self, rng: random.Random, seconds: dict[str, list[float]], duration: float):
        self.rng, self.seconds, self.duration = rng, seconds, duration
        self.planned, self.hit, self.during = Counter(), Counter(), Counter()

    def plan(self) -> Plan:
        """The moment that was killed least, so many times into the run, at its begin, its end or in between."""
        moment = min(MOMENTS, key=lambda moment: (self.planned[moment], self.rng.random()))
        self.planned[moment] += 1
        number = signal.SIGTERM if self.rng.random() < 0.15 else signal.SIGKILL
        if moment == "any":
            return Plan("any", delay=self.rng.random() * self.duration, number=number)
        times = self.seconds.get(moment, [0.01])
        within = self.rng.random() * 2 * mean(times)
        delay = self.rng.choice([0.0, None, within, within])
        return Plan(moment, self.rng.randint(1, max(1, len(times) // 3)), delay, number)

    def count(self, plan: Plan, doing: list[str]) -> None:
        self.hit[plan.moment, signal.Signals(plan.number).name] += 1
        self.during.update(doing or ["nothing of these"])

    def __str__(self) -> str:
        rows = [f"{'moment':14}{'SIGKILL':>9}{'SIGTERM':>9}{'under way':>11}"]
        for moment in [*MOMENTS, "nothing of these"]:
            kills = [self.hit[moment, name] for name in ("SIGKILL", "SIGTERM")]
            rows.append(f"{moment:14}{kills[0]:9}{kills[1]:9}{self.during[moment]:11}")
        return "\n".join(rows)


def killed_run(directory: Path, kills: Kills, left: int, untouched: Path) -> int:
    """Kills one run at most `left` times until it is done, and checks it; gives how many kills there were."""
    begin, count, stopped_at, stops = time.monotonic(), 0, None, set()
    while not (directory / "final.json").exists():
        plan = kills.plan() if count < left else None
        status, doing, said = fork(directory, plan)
        if stopped_at is not None and "began at" in said:  # not killed again while it restored
            assert f"began at {stopped_at}:" in said, f"SIGTERM lost steps: stopped at {stopped_at}, then\n{said}"
            stopped_at = None
        if status == 128 + signal.SIGTERM:
            stopped_at = _stopped_at(said)
            stops.add(stopped_at)
        assert "is damaged" not in said and "NOT SAVED" not in said, said
        if doing is None:
            assert status == 0, said
        else:
            count += 1
            kills.count(plan, doing)
            assert status in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 0), said
    status, said = apart(directory, lambda: check(directory, untouched, begin, stops))
    assert status == 0, said
    return count


def _stopped_at(said: str) -> str:
    return next(line.split()[-1] for line in said.splitlines() if line.startswith("stopped at "))


def check(directory: Path, untouched: Path, begin: float, stops: set[str]) -> None:
    """Compares the end of a run with the expected one. stops: steps after which it was asked to end, saved in all
    tiers.
    """
    final, wanted = (json.loads((path / "final.json").read_text()) for path in (directory, untouched))
    assert final["state"] == wanted["state"]
    for name in ("exports", "parameters"):
        assert files(directory / name) == files(untouched / name), name
    for root, newest in (("near", 1), ("checkpoints", 2), ("parameters", 2)):
        steps = names(directory / root)  # the best one too, unless it was being written when it was killed
        expected = set(names(untouched / root)[-newest:]) | (stops if root == "checkpoints" else set())
        assert steps[-newest:] == sorted(expected, key=int)[-newest:] and len(steps) <= newest + 1, (root, steps)
        assert [bad for step in steps for bad in checkpoint.verify(directory / root / step)] == []
    assert losses(directory) == losses(untouched)
    account, wall = observability.goodput(directory), final["ended"] - begin
    assert abs(account.wall - wall) < 0.02 * wall, f"goodput says {account.wall:.2f} s of {wall:.2f} s\n{account}"
    assert account.steps == killable.STEPS


def files(directory: Path) -> dict[str, bytes]:
    """Returns the contents of an export; of checkpoints only the step names, because the files contain times."""
    weights_only = [
        p for p in directory.rglob("*") if p.suffix in (".safetensors", ".json") and "manifest" not in str(p)
    ]
    contents = {
        str(p.relative_to(directory)): p.read_bytes() for p in weights_only if (p.parent / "config.json").exists()
    }
    return contents | dict.fromkeys(names(directory), b"")


def names(directory: Path) -> list[str]:
    return sorted((p.name for p in directory.iterdir() if p.name != "owner.json"), key=lambda name: (len(name), name))


def losses(directory: Path) -> list[str]:
    rows = read_jsonl(directory / "metrics.jsonl")
    kept = ("step", "loss", "grad_norm", "num_targets", "eval/loss")
    return sorted(str({name: row.get(name) for name in kept}) for row in rows if "loss" in row or "eval/loss" in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--directory", type=Path, help="default: a temporary one, which stays behind only after an error"
    )
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="maxlib-kill-"))
    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    weights.families()  # imported once, here
    print("threads before the first fork:", len(list(Path("/proc/self/task").iterdir())), flush=True)
    begin = time.monotonic()
    untouched, kills = prepare(directory, random.Random(args.seed))
    done = runs = 0
    while done < args.times:
        run = directory / "run"
        shutil.rmtree(run, ignore_errors=True)
        done += killed_run(run, kills, min(args.times - done, kills.rng.randint(2, 8)), untouched)
        runs += 1
        print(f"{kills}\n{done} kills, {runs} runs, {time.monotonic() - begin:.0f} s\n", flush=True)
    print(f"{done} kills in {runs} runs, all as the untouched one, in {time.monotonic() - begin:.0f} s")
    if args.directory is None:
        shutil.rmtree(directory)


def prepare(directory: Path, rng: random.Random) -> tuple[Path, Kills]:
    """Runs without kills, after a run that fills the compilation cache, and returns the durations."""
    for name in ("warm", "untouched"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name, plan in (("warm", Plan("step", nth=9)), ("warm", None), ("untouched", None)):
        begin = time.monotonic()
        status, _, said = fork(directory / name, plan)
        assert status in (0, -signal.SIGKILL) and "NOT SAVED" not in said, said
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    seconds = json.loads((directory / "untouched" / "final.json").read_text())["seconds"]
    seconds["restore"] = json.loads((directory / "warm" / "final.json").read_text())["seconds"]["restore"]
    return directory / "untouched", Kills(rng, seconds, time.monotonic() - begin)


if __name__ == "__main__":
    main()
