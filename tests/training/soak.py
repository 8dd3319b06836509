"""Repeats the operations of long runs, and fits a line to the process's threads, open files and memory.

`python -m tests.training.soak [trainer generator weights loader] [--share 0.05] [--draw docs/soak.png]`; the numbers of
docs/results.md are those of the whole, under `ulimit -n 256`. `short` is the form that the default tests run.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import maxlib
from maxlib import checkpoint, data, distributed, inference, nn, ops, training
from tests.training import tensorstore_leaks, tiny

TIMES = {"trainer": 3000, "generator": 2000, "weights": 200, "loader": 500}
LONG = 1000  # repeats from which on the time of one is compared
FEWEST = {"trainer": 60, "generator": 40, "weights": 12, "loader": 20, "short": 150}
SAMPLES = 60
# Growth that is allowed for each repeat after the first fifth.
LIMITS = {"threads": 0.02, "rss_kib": 20.0, "in_use_kib": 20.0, "python_blocks": 60.0}
# The CPU seconds of a repeat at the end of a long run may be this many times those of a process that has just begun.
SLOWER = 1.05
WARM_UP, TURNS = 100, 6  # repeats of that process before it counts, and how often the two take turns
# Of fewer than 300 repeats: XLA's and tensorstore's pools start their last few threads late on a busy machine, and
# resident memory is warm-up.
SHORT_LIMITS = {"threads": 0.04, "in_use_kib": 20.0, "python_blocks": 60.0}
CLOCKS = ("seconds", "cpu_seconds")
Sample = dict[str, float]


MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of glibc


class MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO.split())


def heap() -> Sample:
    """KiB that C and C++ have allocated and not freed, and what glibc's arenas hold above that, ready to be used again.

    Resident memory rises with the arenas, of which every short-lived thread may open another one; leaked memory counts
    as allocated.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    usage = mallinfo()
    return {"in_use_kib": (usage.uordblks + usage.hblkhd) / 1024, "free_kib": usage.fordblks / 1024}


def sample(directory: Path) -> Sample:
    """Returns the resources of this process: threads, files, memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rss_kib": pages * os.sysconf("SC_PAGESIZE") / 1024,
        "python_blocks": sys.getallocatedblocks(),
        "arrays": len(jax.live_arrays()),
        "shared_memory": Path("/proc/self/maps").read_text().count(" /dev/shm/"),
        "files": sum(len(files) for _, _, files in os.walk(directory)),
    } | heap()


class Recorder:
    """Takes samples at every `every`-th call, with the number of calls before it and the seconds that one of them took,
    on the wall and of CPU.

    The last of them are taken in turn with a `Beginner`, if there is one: `beside` are its CPU seconds. `settle` is
    called before a sample: what is under way comes to its end.
    """

    def __init__(self, directory: Path, times: int, samples: int, beginner: "Beginner | None" = None):
        self.samples: list[Sample] = []
        self._directory, self._every, self._beginner = directory, max(1, times // samples), beginner
        self._calls, self._turns_from, self._begin = 0, times - TURNS * self._every, self._clocks()

    @staticmethod
    def _clocks() -> np.ndarray:
        return np.array([time.monotonic(), time.process_time()])

    def __call__(self, settle: Callable[[], Any] = lambda: None) -> None:
        self._calls += 1
        if self._calls % self._every:
            return
        settle()
        seconds, cpu = ((self._clocks() - self._begin) / self._every).tolist()
        taken = {"times": self._calls, "seconds": seconds, "cpu_seconds": cpu} | self._beside()
        self.samples.append(taken | sample(self._directory))
        self._begin = self._clocks()

    def _beside(self) -> Sample:
        if self._beginner is None or self._calls < self._turns_from:
            return {}
        if self._calls == self._turns_from:
            self._beginner.repeat(WARM_UP)
            return {}
        return {"beside": self._beginner.repeat(self._every)}


class Beginner:
    """Another process that repeats the same work when it is asked to, so that both meet the same machine.

    It exists from the start, so that its pipes are no growth, and does nothing until it is asked.
    """

    def __init__(self, part: str):
        command = [sys.executable, "-m", "tests.training.soak", part, "--in-turn"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def repeat(self, times: int) -> float:
        """CPU seconds of a repeat."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(times, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()  # closes its input, by which it ends


class InTurn:
    """The loop of a `Beginner`: as many repeats as a line of its input asks for, then their CPU seconds in a line."""

    def __init__(self) -> None:
        self._wait()

    def _wait(self) -> None:
        if not (line := sys.stdin.readline()):
            raise KeyboardInterrupt
        self._asked = self._left = int(line)
        self._begin = time.process_time()

    def __call__(self, settle: Callable[[], Any] = lambda: None) -> None:
        self._left -= 1
        if self._left:
            return
        settle()
        print((time.process_time() - self._begin) / self._asked, file=sys.__stdout__, flush=True)
        gc.collect()  # as `sample` does
        self._wait()


def trainer(directory: Path, times: int, record: Callable[..., None]) -> None:
    """A step with a save of everything each time, evaluations, both exports, metrics and a mixture."""
    model = tiny.llama(num_layers=1, rope=ops.Rope(12, max_length=64))
    train(model, directory, times, record, optimizer=training.adamw(1e-3, mask=training.decay_mask(model)))


def short(directory: Path, times: int, record: Callable[..., None]) -> None:
    """The same with the smallest model that is one and an optimizer without moments: the fewest arrays to save."""
    train(Smallest(rngs=nnx.Rngs(0)), directory, times, record, optimizer=optax.sgd(1e-3), hugging_face=False)


def train(
    model: Any, directory: Path, times: int, record: Callable[..., None], *, optimizer: Any, hugging_face: bool = True
) -> None:
    tensorstore_leaks.avoid()
    exports = [training.ParameterExport(directory / "parameters", every=25, keep=2)]
    if hugging_face:
        exports.append(training.HuggingFaceExport(directory / "exports", every=25, keep=2))

    def settle() -> None:
        for part in (ours.checkpointer, *exports):
            part.wait()

    ours = training.Trainer(
        model,
        optimizer=optimizer,
        loss=tiny.loss,
        loader=loader_of(seed=0),
        evaluation=training.Evaluation(loader_of(seed=1, num_batches=2), every=10),
        directory=directory,
        checkpointer=checkpoint.Checkpointer(directory / "run", every=1, keep=2, best=checkpoint.Best("eval/loss")),
        callbacks=[*exports, (1, lambda _: record(settle))],
    )
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        ours.fit(times)
        ours.checkpointer.close()


class Smallest(nnx.Module):
    """A language model of one array, which compiles in no time."""

    softcap = None

    def __init__(self, dim: int = 4, *, rngs: nnx.Rngs):
        self.embed = nn.Embed(tiny.VOCAB, dim, rngs=rngs)

    def __call__(self, tokens, *, positions=None, segment_ids=None, valid=None, cache=None, dtype=None, remat=None):
        return nn.Output(self.embed(tokens, dtype=dtype), None, {})

    def head_weight(self):
        return self.embed.w[...]


def generator(directory: Path, times: int, record: Callable[..., None]) -> None:
    """Texts of mixed lengths."""
    rng = np.random.default_rng(0)
    ours = inference.Generator(tiny.llama(rope=ops.Rope(12)), dtype=jnp.float32)
    for _ in range(times):
        rows = [rng.integers(0, tiny.VOCAB, n).tolist() for n in rng.integers(1, 30, rng.choice([1, 2, 4]))]
        ours.generate(rows, max_new_tokens=int(rng.integers(1, 9)))
        record()


def weights(directory: Path, times: int, record: Callable[..., None]) -> None:
    """Models written and read again."""
    model = tiny.llama(rope=ops.Rope(12, max_length=64))
    for _ in range(times):
        maxlib.save_pretrained(model, directory / "model", overwrite=True)
        model = maxlib.from_pretrained(directory / "model")
        record()


def loader(directory: Path, times: int, record: Callable[..., None]) -> None:
    """Epochs, each from a state that was saved."""
    ours = loader_of(seed=0, num_batches=5)
    for _ in range(times):
        ours.reset()
        next(ours)
        ours.set_state(ours.get_state())
        assert len(list(ours)) == 4
        record()


def loader_of(*, seed: int, num_batches: int | None = None) -> data.Loader:
    rng = np.random.default_rng(seed)
    texts = lambda: data.in_memory([rng.integers(0, tiny.VOCAB, n).tolist() for n in rng.integers(3, 20, 50)])
    mixture = data.Mixture({"a": texts(), "b": texts()}, weights={"a": 2, "b": 1}, seed=seed)
    rows = lambda part: data.pack(mixture[part], length=12, bins=4)
    return data.Loader(rows, batch_size=4, num_shards=2, num_batches=num_batches)


PARTS = {f.__name__: f for f in (trainer, generator, weights, loader, short)}


def run(part: str, times: int, samples: int = SAMPLES) -> list[Sample]:
    """The samples of one part, up to its end or to Ctrl-C."""
    beginner = Beginner(part) if times >= LONG else None
    gc.collect()
    gc.freeze()  # each sample collects garbage, and need not look at what is imported
    with tempfile.TemporaryDirectory() as root:
        record = Recorder(Path(root), times, samples, beginner)
        with contextlib.suppress(KeyboardInterrupt, distributed.Interrupted):
            PARTS[part](Path(root), times, record)
    if beginner is not None:
        beginner.close()
    return record.samples


def in_turn(part: str) -> None:
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(KeyboardInterrupt):
        PARTS[part](Path(root), 1 << 30, InTurn())


def slopes(samples: list[Sample]) -> dict[str, float]:
    """Growth per repeat after the first fifth, by least squares, but for times."""
    late = samples[len(samples) // 5 :]
    times = np.array([s["times"] for s in late])
    return {
        name: float(np.polyfit(times, [s[name] for s in late], 1)[0])
        for name in late[0]
        if name not in ("times", "beside", *CLOCKS)
    }


def slower(samples: list[Sample]) -> float:
    """CPU seconds of a repeat over those of a process that has just begun; 1 without one."""
    return float(np.median([s["cpu_seconds"] / s["beside"] for s in samples if "beside" in s] or [1.0]))


def failures(samples: list[Sample], limits: Mapping[str, float] = LIMITS) -> list[str]:
    """Returns the resources that grow after the first fifth and must not."""
    late, grown = samples[len(samples) // 5 :], slopes(samples)
    bad = [
        f"{name} went from {late[0][name]:.0f} to {late[-1][name]:.0f}"
        for name in ("python threads", "descriptors", "shared_memory", "arrays")
        if late[-1][name] > late[0][name]
    ]
    if max(s["files"] for s in late) > 1.5 * late[len(late) // 2]["files"]:  # old steps and exports go
        bad.append(f"files went from {late[0]['files']:.0f} to {late[-1]['files']:.0f}")
    too_fast = [name for name in limits if grown[name] > limits[name]]
    bad += [f"{name} grows by {grown[name]:.3f} a repeat, limit {limits[name]}" for name in too_fast]
    if (ratio := slower(samples)) > SLOWER:
        bad.append(f"a repeat takes {ratio:.3f} times the CPU seconds of one in a new process, limit {SLOWER}")
    return bad


def draw(by_run: dict[str, list[Sample]], path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = {"threads": 1, "descriptors": 1, "rss_kib": 1024, "in_use_kib": 1024, "python_blocks": 1e6, "cpu_seconds": 1}
    labels = (
        "threads",
        "descriptors",
        "resident, MiB",
        "in use, MiB",
        "Python's blocks, millions",
        "CPU seconds of a repeat",
    )
    figure, axes = plt.subplots(len(rows), len(by_run), figsize=(4 * len(by_run), 11), squeeze=False, sharex="col")
    for column, (part, samples) in enumerate(by_run.items()):
        for row, (name, unit) in enumerate(rows.items()):
            values = [s[name] / unit for s in samples]
            axes[row][column].plot([s["times"] for s in samples], values, color="#4477aa")
            axes[row][column].set_ylim(0, 1.15 * max(values))
            axes[row][0].set_ylabel(labels[row])
        axes[0][column].set_title(part)
        axes[-1][column].set_xlabel("repeats")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser()
    options.add_argument("parts", nargs="*", default=list(TIMES))
    options.add_argument("--share", type=float, default=1.0, help="of the number of repeats")
    options.add_argument("--draw", type=Path)
    options.add_argument("--in-turn", action="store_true", help="repeat one part when standard input asks for it")
    chosen = options.parse_args(arguments)
    if chosen.in_turn:
        in_turn(*chosen.parts)
        return 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    by_run: dict[str, Any] = {}
    bad: list[str] = []
    for part in chosen.parts:
        times = max(FEWEST[part], round(TIMES.get(part, 0) * chosen.share))
        # In so short a run the arenas of new threads are not filled yet: what is in use says more than what is
        # resident.
        limits = LIMITS if times >= 300 else SHORT_LIMITS
        samples = run(part, times, SAMPLES if times >= 300 else 15)
        by_run[part] = samples
        print(part, json.dumps({"samples": samples[:: max(1, len(samples) // 10)]}), flush=True)
        print(part, json.dumps({"first": samples[0], "last": samples[-1], "growth": slopes(samples)}), flush=True)
        print(part, f"takes {slower(samples):.3f} times the CPU seconds of a new process", flush=True)
        bad += [f"{part}: {problem}" for problem in failures(samples, limits)]
    if chosen.draw:
        draw(by_run, chosen.draw)
    print("\n".join(bad) or "nothing grows")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
