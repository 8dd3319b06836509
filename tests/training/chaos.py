"""Injects faults into a training run of several processes, under the recommended launcher, and compares its end with an
undisturbed run.

`nox -s chaos` or `python -m tests.training.chaos --faults 60 --period 30 --processes 4 --draw docs/chaos.png`. Nothing
that was finished may be lost, the final parameters, moments and places in the data must be those of the untouched run,
bit for bit, and a fault that stops the run must be said within a minute.

`--costs FILE` writes what faults cost into the file. Given a file of an earlier run, it prints before the first fault
the goodput that `plan.simulate_goodput` predicts from them: `--seed 1 --faults 11 --costs costs.json`, and then
`--seed 2 --faults 11 --costs costs.json`.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

from maxlib import checkpoint, plan
from maxlib.distributed._launcher import furthest
from maxlib.observability import read_jsonl
from tests.training import chaotic

ROOT = Path(__file__).parents[2]
LOUD = 60.0  # seconds in which a fault that stops the run must be said
BRIEF = 2.5  # seconds that a fault lasts which the run may outlive
PAUSE = 0.05  # seconds that a step waits


class Run:
    """A launcher with its processes, and their output."""

    def __init__(self, directory: Path, processes: int, pause: float, paced: int = 1 << 30):
        self.directory, self.processes, self.said = directory, processes, []
        launcher = f"-m maxlib.distributed launch --grace 2 --retries 5 --processes {processes} --directory".split()
        program = [sys.executable, "-m", "tests.training.chaotic", directory, pause, paced]
        self._launcher = subprocess.Popen(
            [str(word) for word in (sys.executable, *launcher, directory, "--", *program)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self.said.append((time.monotonic(), line.rstrip()))

    @property
    def step(self) -> int:
        return furthest(self.directory)

    @property
    def pids(self) -> list[int]:
        return [note for note in self.notes() if note["event"] == "start"][-1]["pids"]

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    def notes(self) -> list[dict]:
        path = self.directory / "launch.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self) -> int:
        return sum(note["event"] == "start" for note in self.notes())

    def wait(self, seconds: float) -> int:
        return self._launcher.wait(seconds)

    def kill(self) -> None:
        """Ends everything, after an error of the test itself."""
        for pid in [self._launcher.pid, *self.pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(line for _, line in self.said)


def environment() -> dict[str, str]:
    """One device a process."""
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


@dataclasses.dataclass
class Fault:
    """A fault that was thrown: seconds into the run, the step before it, and how long the run needed to get over it."""

    name: str
    at: float
    step: int
    lost: float = 0.0
    noticed: float = 0.0  # seconds until the launcher started again
    again: int = 0  # steps done again
    restarted: bool = False


def kill(run: Run, rng: random.Random) -> None:
    """SIGKILL for one process."""
    os.kill(rng.choice(run.pids), signal.SIGKILL)


def lost_disk(run: Run, rng: random.Random) -> None:
    """SIGKILL for one process, and its directory of near checkpoints is deleted."""
    process = rng.randrange(len(run.pids))
    os.kill(run.pids[process], signal.SIGKILL)
    shutil.rmtree(run.directory / f"disk-{process}", ignore_errors=True)


def stop(run: Run, rng: random.Random) -> None:
    """SIGSTOP for one process; the others' deadline passes."""
    os.kill(rng.choice(run.pids), signal.SIGSTOP)


def full_disk(run: Run, rng: random.Random) -> None:
    """No process may write past the first kilobyte of a file for a while."""
    for limit in (1024, resource.RLIM_INFINITY):
        for pid in run.pids:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
        time.sleep(BRIEF if limit == 1024 else 0)


def no_directory(run: Run, rng: random.Random) -> None:
    """Nothing can be written to the directory of checkpoints for a while, by root neither: a file is in its place."""
    there, aside = run.directory / "checkpoints", run.directory / "aside"
    there.rename(aside)
    there.write_text("in the way")
    time.sleep(BRIEF)
    there.unlink()
    aside.rename(there)


def slow_disk(run: Run, rng: random.Random) -> None:
    """Every save takes seconds longer for a while."""
    mark = run.directory / "faults" / "slow"
    mark.touch()
    time.sleep(2 * BRIEF)
    mark.unlink()


def truncated(run: Run, rng: random.Random) -> None:
    """The newest checkpoint loses half of a file while the run is down, and no near checkpoint is left."""
    file = _newest_file(run, rng)
    os.truncate(file, file.stat().st_size // 2)


def flipped(run: Run, rng: random.Random) -> None:
    """One bit of the newest checkpoint changes while the run is down, and no near checkpoint is left."""
    file = _newest_file(run, rng)
    with file.open("r+b") as opened:
        place = file.stat().st_size // 2
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _newest_file(run: Run, rng: random.Random) -> Path:
    """The largest file of the newest step, after one process was killed and nothing more can be saved."""
    kill(run, rng)
    time.sleep(0.3)
    for disk in run.directory.glob("disk-*"):
        shutil.rmtree(disk, ignore_errors=True)
    newest = run.directory / "checkpoints" / str(steps(run.directory)[-1])
    return max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def reader(run: Run, rng: random.Random) -> None:
    """A reader of the data fails."""
    (run.directory / "faults" / "data").touch()


def peer(run: Run, rng: random.Random) -> None:
    """All connections of one process are cut."""
    pid = rng.choice(run.pids)
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(434, pid, 0)  # pidfd_open
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (
                os.readlink(link).startswith("socket:")
                and (descriptor := libc.syscall(438, process, int(link.name), 0)) >= 0
            ):
                with socket.socket(fileno=descriptor) as connection:  # pidfd_getfd
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)
    os.close(process)


def clock(run: Run, rng: random.Random) -> None:
    """The wall clock jumps by hours."""
    (run.directory / "faults" / "clock").write_text(str(rng.choice([-1, 1]) * 7200.0 * rng.random()))


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    f.__name__: f
    for f in (kill, lost_disk, stop, full_disk, no_directory, slow_disk, truncated, flipped, reader, peer, clock)
}
FATAL = {"kill", "lost_disk", "stop", "truncated", "flipped", "reader", "peer"}
TOGETHER = {"stop", "peer"}  # of one process alone they say nothing


def steps(directory: Path) -> list[int]:
    folder = directory / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def throw(run: Run, name: str, rng: random.Random, begin: float) -> Fault:
    """Throws one fault, and waits until the run is further than before."""
    before, starts, good = run.step, run.starts(), steps(run.directory)
    fault, at, heard = Fault(name, time.monotonic() - begin, before), time.monotonic(), len(run.said)
    FAULTS[name](run, rng)
    wait_for(
        lambda: run.starts() > starts or (name not in FATAL and run.step > before), LOUD, run, f"{name} to be said"
    )
    fault.restarted, fault.noticed = run.starts() > starts, time.monotonic() - at
    begins = lambda: [int(line.split()[-1]) for _, line in run.said[heard:] if line.startswith("began at ")]
    reached = max(before, run.step)
    if fault.restarted:
        wait_for(begins, 240, run, f"the run to start again after {name}")
        kept = good[-2 if name in ("truncated", "flipped") else -1 :][0]
        assert begins()[0] >= kept, f"{name} lost the step {kept}: began at {begins()}\n{run.text()[-3000:]}"
        fault.again = reached - begins()[0]
    wait_for(lambda: run.step > reached, 240, run, f"the run to go on after {name}")
    fault.lost = time.monotonic() - at
    return fault


def wait_for(done: Callable[[], bool], seconds: float, run: Run, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert not run.ended, f"the run ended while waiting for {what}\n{run.text()[-5000:]}"
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{run.text()[-5000:]}"
        time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that a run needed: measured in one run, they predict another.

    Attributes:
        start: From the launcher's start to the second save, before the first fault.
        step: Median of a step.
        running: Of a kept step while the run goes on, with waits for saves and faults that do not stop it.
        noticed: From a fault that stops the run to the launcher's next start, by kind.
        restarts: From there to the next step: to start processes that share the machine's cores, to compile and to
            restore.
    """

    start: float
    step: float
    running: float
    noticed: dict[str, float]
    restarts: dict[str, float]

    def at_speed(self, start: float) -> "Costs":
        """Returns what all costs while a start takes `start` seconds, as others use the machine too."""
        slower = start / self.start
        step, running = (PAUSE + (seconds - PAUSE) * slower for seconds in (self.step, self.running))
        restarts = {name: seconds * slower for name, seconds in self.restarts.items()}
        return Costs(start, step, running, self.noticed, restarts)

    def goodput(self, names: list[str], period: float) -> float:
        """Returns the goodput that `plan.simulate_goodput` predicts for these faults, one every `period` seconds."""
        now, failures, restarts = 0.0, [], []
        for number, name in enumerate(names, 1):
            now = max(now, number * period)
            if name in self.restarts:
                failures.append(now)
                restarts.append(self.noticed[name] + self.restarts[name])
                now += restarts[-1]
        far = sum(name in ("truncated", "flipped") for name in names)  # no near checkpoint is left
        cluster = plan.Cluster(
            hosts=1,
            hours_between_failures=period / 3600,  # not used: the times are known
            restart=mean(restarts),
            tiers=[plan.Tier(save=0, restore=0, survives=1 - far / len(failures)), plan.Tier(save=0, restore=0)],
            straggling=self.running / self.step,
        )
        intervals = [chaotic.NEAR * self.running, 2 * chaotic.EVERY * self.running]  # the newest far one is damaged
        days = max(now, (len(names) + 1) * period) / 86_400
        return plan.simulate_goodput(cluster, intervals, days=days, failures=failures).useful


@dataclasses.dataclass
class Result:
    """Result of the run."""

    faults: list[Fault]
    progress: list[tuple[float, int]]
    wall: float
    pace: tuple[float, float]  # median seconds of a step: untouched, and between faults
    start: float  # seconds, as in `Costs`

    def goodput(self) -> float:
        """The share of the time in steps that were kept."""
        (begin, first), (end, last) = self.progress[0], self.progress[-1]
        return (last - first) * self.pace[1] / (end - begin)

    def costs(self) -> "Costs":
        """What faults and steps cost here."""
        (begin, first), (end, last) = self.progress[0], self.progress[-1]
        stops = [fault for fault in self.faults if fault.restarted]
        # A fault is over after a new step.
        running = (end - begin - sum(fault.lost for fault in stops)) / (last - first - len(stops))
        count = collections.Counter(fault.name for fault in self.faults)  # of which some may not stop the run
        noticed, restarts = ({fault.name: 0.0 for fault in stops} for _ in range(2))
        for fault in stops:
            noticed[fault.name] += fault.noticed / count[fault.name]
            back = fault.lost - fault.noticed - (fault.again + 1) * running
            restarts[fault.name] += back / count[fault.name]
        return Costs(self.start, self.pace[1], running, noticed, restarts)

    def __str__(self) -> str:
        rows = [f"{'fault':14}{'times':>6}{'restarts':>9}{'seconds lost, median':>22}{'most':>8}"]
        for name in FAULTS:
            if named := [fault for fault in self.faults if fault.name == name]:
                lost = [fault.lost for fault in named]
                restarts = sum(fault.restarted for fault in named)
                rows.append(f"{name:14}{len(named):6}{restarts:9}{median(lost):22.1f}{max(lost):8.1f}")
        untouched, ours = self.pace
        rows.append(
            f"{len(self.faults)} faults in {self.wall:.0f} s; a step takes {ours:.3f} s, untouched {untouched:.3f}"
        )
        steps, again = self.progress[-1][1], sum(fault.again for fault in self.faults)
        rows.append(
            f"{100 * steps / (steps + again):.1f} % of the steps were useful: {again} of {steps} were done again"
        )
        rows.append(f"goodput {100 * self.goodput():.1f} %")
        return "\n".join(rows)


def chaos(
    directory: Path,
    names: list[str],
    *,
    processes: int,
    period: float,
    pause: float = PAUSE,
    seed: int = 0,
    costs: Costs | None = None,
) -> Result:
    """Injects the faults into a run, one every `period` seconds, or later while the run is still getting over the last;
    the run goes on for a period after the last fault.

    Raises AssertionError if the run ends differently from the undisturbed one.
    """
    rng, progress, faults, launched = random.Random(seed), [], [], time.monotonic()
    with running(Run(directory / "chaos", processes, pause)) as run:
        wait_for(run.notes, 60, run, "the first start")
        wait_for(lambda: len(steps(run.directory)) > 1, 240, run, "a save")
        begin = time.monotonic()
        if costs is not None:
            simulated = costs.at_speed(begin - launched).goodput(names, period)
            print(f"goodput simulated before the first fault {100 * simulated:.1f} %", flush=True)

        def watch(until: float) -> None:
            while time.monotonic() < begin + until:
                progress.append((time.monotonic() - begin, run.step))
                time.sleep(0.2)
            progress.append((time.monotonic() - begin, run.step))

        for number, name in enumerate(names, 1):
            reached = run.step
            wait_for(lambda reached=reached: run.step > reached and len(steps(run.directory)) > 1, 240, run, "a save")
            watch(number * period)
            faults.append(throw(run, name, rng, begin))
        watch((len(names) + 1) * period)
        last = end_after(run.directory, run.step + chaotic.CHUNK)
        assert run.wait(240) == 0, run.text()[-5000:]
        said = [(at - begin, line) for at, line in run.said]
    wall = time.monotonic() - begin
    record = {"faults": [dataclasses.asdict(fault) for fault in faults], "progress": progress, "said": said}
    (directory / "record.json").write_text(json.dumps(record))
    end_after(directory / "untouched", last)
    with running(Run(directory / "untouched", processes, pause, 2 * chaotic.CHUNK)) as untouched:
        assert untouched.wait(1800) == 0, untouched.text()[-5000:]
    pace = compare(directory / "chaos", directory / "untouched", processes, last)
    return Result(faults, progress, wall, pace, begin - launched)


@contextlib.contextmanager
def running(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        if not run.ended:
            run.kill()


def end_after(directory: Path, step: int) -> int:
    """Writes the run's last step: the end of the chunk of steps that contains `step`."""
    last = -(-step // chaotic.CHUNK) * chaotic.CHUNK
    (directory / "faults").mkdir(parents=True, exist_ok=True)
    (directory / "faults" / "end").write_text(str(last))
    return last


def compare(ours: Path, untouched: Path, processes: int, last: int) -> tuple[float, float]:
    """Asserts that both runs ended alike; returns their median step times, the undisturbed one first."""
    for process in range(processes):
        got, wanted = (json.loads((path / f"final-{process}.json").read_text()) for path in (ours, untouched))
        assert got == wanted, f"process {process} came to another end"
    newest = ours / "checkpoints" / str(steps(ours)[-1])
    assert newest.name == str(last) and checkpoint.verify(newest) == []
    rows = [
        {row["step"]: row for row in read_jsonl(path / "metrics.jsonl") if "loss" in row} for path in (ours, untouched)
    ]
    assert all(rows[0][step]["loss"] == rows[1][step]["loss"] for step in rows[0])
    assert len(rows[0]) >= 0.9 * last  # where the disk was full, lines are lost
    timed = [[row["seconds"] for step, row in by_step.items() if "seconds" in row] for by_step in rows]
    return median(timed[1][: chaotic.CHUNK]), median(timed[0])


def draw(result: Result, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 5))
    axes.plot(*zip(*result.progress, strict=True), color="#222222", linewidth=1.5)
    colors = dict(zip(FAULTS, plt.colormaps["tab20"].colors, strict=False))
    for fault in result.faults:
        axes.axvspan(fault.at, fault.at + fault.lost, color=colors[fault.name], alpha=0.35, linewidth=0)
    for name in dict.fromkeys(fault.name for fault in result.faults):
        axes.axvspan(0, 0, color=colors[name], alpha=0.35, label=name.replace("_", " "))
    axes.set(xlabel="seconds", ylabel="step", title=f"{len(result.faults)} faults")
    axes.legend(ncols=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def choose(count: int, processes: int, rng: random.Random) -> list[str]:
    """All faults alike often, in a random order."""
    possible = [name for name in FAULTS if processes > 1 or name not in TOGETHER]
    names = [possible[i % len(possible)] for i in range(count)]
    rng.shuffle(names)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--period", type=float, default=30.0, help="seconds from one to the next")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="default: a temporary one, which stays only after an error")
    parser.add_argument("--costs", type=Path, help="file of costs: written, or predicted from if it exists")
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="maxlib-chaos-"))
    names = choose(args.faults, args.processes, random.Random(args.seed))
    costs = None
    if args.costs is not None and args.costs.exists():
        costs = Costs(**json.loads(args.costs.read_text()))
    result = chaos(directory, names, processes=args.processes, period=args.period, seed=args.seed, costs=costs)
    print(result)
    if args.costs is not None and costs is None:
        args.costs.write_text(json.dumps(dataclasses.asdict(result.costs())))
    if args.draw:
        draw(result, args.draw)
    if args.directory is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
