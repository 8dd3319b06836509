"""Feeds damaged files to maxlib's readers, in a child process with limits.

`nox -s fuzz` or `python -m tests.fuzz.run [TARGET ...] --seconds 60 --inputs 1000000`. Each input must end as a result,
or as an error of the class that the reader's documentation names, with a message that names the file; never as another
error, in more than 5 seconds of CPU, with more than 1 GiB, or with a file outside of its directory. An input is made of
its target and its number: `--only NUMBER` repeats it.

The 5 seconds are CPU time, because the wall clock would call inputs slow on a busy machine. A process in which an input
takes a minute is killed; that is a finding as well.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import json
import mmap
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, Target

SECONDS, HANGS, GIB = 5.0, 60.0, 1 << 30
_CHILD = 120.0  # seconds after which a child is replaced, so that what its libraries keep does not add up
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def targets() -> dict[str, Target]:
    return {name: target for name, target in TARGETS.items() if importlib.util.find_spec(target.needs)}


class Slow(BaseException):
    """An input that took too long."""


def one(name: str, target: Target, number: int, undamaged: dict[str, bytes], directory: Path) -> str | None:
    """Reads one damaged input; returns a description of a wrong outcome, or None."""
    rng = random.Random(f"{name} {number}")
    chosen = rng.choice(sorted(target.kinds))
    path = directory / (Path(chosen).name if target.alone else chosen)
    _write(path, mutate(undamaged[chosen], target.kinds[chosen], rng))
    # The other files stay from input to input; a reader may have removed some.
    for file in () if target.alone else undamaged.keys() - {chosen}:
        if not os.path.exists(other := directory / file):
            _write(other, undamaged[file])
    try:
        return _wrong(target, chosen, directory)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except FileNotFoundError:
        path.parent.mkdir(parents=True)
        path.write_bytes(data)


def _wrong(target: Target, chosen: str, directory: Path) -> str | None:
    try:
        target.read(directory)
    except Slow:
        return "took longer than 5 s"
    except target.errors as error:
        if target.names_file and not any(word in str(error) for word in (Path(chosen).name, str(directory))):
            return f"names no file: {type(error).__name__}: {str(error)[:200]} {_where(error)}"
    except MemoryError as error:
        return f"took more than {target.gib} GiB {_where(error)}"
    except BaseException as error:  # panics of Rust are no Exception
        return f"{type(error).__name__}: {str(error)[:200]} {_where(error)}"
    return None


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "maxlib" in f.filename] or [None]
    last = frames[-1]
    return "" if last is None else f"({Path(last.filename).name}:{last.name})"


def whole_files(target: Target) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as root:
        if (child := os.fork()) == 0:  # this process must never start jax's threads
            try:
                target.make(Path(root))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)
        return files_in(Path(root), target)


def files_in(root: Path, target: Target) -> dict[str, bytes]:
    """The whole files by name; all that the target damages are among them."""
    contents = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    if missing := sorted(set(target.kinds) - set(contents)):
        raise ValueError(f"make must write every file of kinds, it wrote {sorted(contents)} and not {missing}")
    return contents


@dataclasses.dataclass
class Result:
    """How many inputs there were, the CPU seconds that they took, and the numbers of those that ended badly by what
    happened.
    """

    inputs: int = 0
    seconds: float = 0.0
    findings: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))


def fuzz_one(name: str, target: Target, seconds: float, first: int = 0, inputs: int = 1 << 62) -> Result:
    """Reads so many inputs, or for so many seconds, in children that are replaced when they die or are old."""
    undamaged, result, end = whole_files(target), Result(), time.monotonic() + seconds
    shared = mmap.mmap(-1, 16)  # the number of the input that is read now
    number, last = first, first + inputs - 1
    while time.monotonic() < end and number <= last:
        with tempfile.TemporaryDirectory(dir=_MEMORY) as root, tempfile.TemporaryFile("w+") as said:
            shared[:8] = number.to_bytes(8, "little")
            if (child := os.fork()) == 0:
                until = min(end, time.monotonic() + _CHILD)
                _work(name, target, range(number, last + 1), undamaged, Path(root) / "in", shared, said, until)
            status, used = _watch(child, shared)
            result.seconds += used
            reached = int.from_bytes(shared[:8], "little")
            said.seek(0)
            for line in said:
                at, text = json.loads(line)
                result.findings[re.sub(r"0x[0-9a-f]+|\d+", "N", text)].append(
                    at
                )  # what differs in numbers is one thing
            if status:
                result.findings[f"ended the process with {status}"].append(reached)
            if outside := sorted({p.name for p in Path(root).iterdir()} - {"in"}):
                result.findings[f"wrote {outside}"].append(reached)
            number = reached + 1
    result.inputs = number - first
    return result


def _work(
    name: str, target: Target, numbers: range, undamaged: Any, directory: Path, shared: Any, said: Any, end: float
) -> None:
    """The child: never returns."""
    status = 3
    try:
        directory.mkdir()
        os.chdir(directory)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(target.gib * GIB)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in numbers:
            shared[:8] = number.to_bytes(8, "little")
            if wrong := limited(one, name, target, number, undamaged, directory):
                said.write(json.dumps([number, wrong]) + "\n")
                said.flush()
            if time.monotonic() > end:
                break
        status = 0
    finally:
        os._exit(status)


def limited(call: Callable[..., Any], *args: Any) -> Any:
    """Calls, and raises `Slow` in it after 5 s of this process's CPU: a busy machine makes nothing slow."""
    before = signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return call(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _too_slow(*_: Any) -> None:
    raise Slow


def _watch(child: int, shared: Any) -> tuple[int, float]:
    """Waits for the child; kills it where one input waits for long, or computes for long where no signal is seen.

    Returns its status and CPU seconds.
    """
    at, since = b"", time.monotonic()
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if shared[:8] != at:
            at, since = shared[:8], time.monotonic()
        if time.monotonic() - since > HANGS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = targets()
    parser.add_argument("targets", nargs="*", default=list(known))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--inputs", type=int, default=1 << 62, help="for each target, at most")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="this input of one target, with its traceback, in the present folder")
    args = parser.parse_args()
    if args.only is not None:
        (name,) = args.targets
        print(one(name, known[name], args.only, whole_files(known[name]), Path("fuzzed").resolve()) or "fine")
        return 0
    bad = False
    for name in args.targets:
        result = fuzz_one(name, known[name], args.seconds, args.first, args.inputs)
        speed = result.inputs / max(result.seconds, 1e-9)
        summary = f"{len(result.findings)} findings"
        print(f"{name}: {result.inputs} inputs, {summary}, {speed:.0f} inputs a CPU second", flush=True)
        for text, numbers in result.findings.items():
            bad = True
            print(f"  {len(numbers)} times, such as {numbers[0]}: {text}", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
