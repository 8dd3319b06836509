"""Runs what a long run does again and again, and fits a line to all that a process holds: threads, open files, memory.

`python -m tests.training.soak [trainer generator weights loader] [--share 0.05] [--draw docs/soak.png]`; the numbers of
docs/reliability.md are those of the whole, under `ulimit -n 256`. `short` is the form that the default tests run.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
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
from tests.training import tiny

TIMES = {"trainer": 3000, "generator": 2000, "weights": 200, "loader": 500}
LONG = 1000  # repeats from which on the time of one is compared
FEWEST = {"trainer": 60, "generator": 40, "weights": 12, "loader": 20, "short": 150}
SAMPLES = 60
# Growth that is allowed for each repeat after the first fifth.
LIMITS = {"threads": 0.02, "rss_kib": 20.0, "in_use_kib": 20.0, "python_blocks": 60.0}
# Of the CPU time of a repeat, the last tenth over the first. It is counted in units of `reference`, because a core that
# shares its caches with other programs needs more seconds for the same work.
SLOWER = {"work": 0.05}
# Of fewer than 300 repeats: XLA's and tensorstore's pools start their last few threads late on a busy machine, and
# resident memory is warm-up.
SHORT_LIMITS = {"threads": 0.04, "in_use_kib": 20.0, "python_blocks": 60.0}
CLOCKS = ("seconds", "cpu_seconds", "work")
Sample = dict[str, float]


MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of glibc


class MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO.split())


def heap() -> Sample:
    """KiB that C and C++ have allocated and not freed, and what glibc's arenas hold above that, ready to be used again.

    Resident memory rises with the arenas, of which every thread of a short life may open another one; a leak is in use.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    found = mallinfo()
    return {"in_use_kib": (found.uordblks + found.hblkhd) / 1024, "free_kib": found.fordblks / 1024}


def sample(directory: Path) -> Sample:
    """What this process holds now."""
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
    """Takes samples at every `every`-th call, with the number of calls before it and the time that one of them took: on
    the wall, of CPU, and in units of `reference`, which runs beside each.

    `settle` is called before a sample: what is under way comes to its end.
    """

    def __init__(self, directory: Path, every: int):
        self.samples: list[Sample] = []
        self._directory, self._every, self._calls = directory, every, 0
        self._reference, self._begin = 0.0, self._clocks()

    @staticmethod
    def _clocks() -> np.ndarray:
        return np.array([time.monotonic(), time.process_time()])

    def __call__(self, settle: Callable[[], Any] = lambda: None) -> None:
        self._calls += 1
        self._reference += timed(reference)
        if self._calls % self._every:
            return
        settle()
        seconds, cpu = ((self._clocks() - self._begin - self._reference) / self._every).tolist()
        work = cpu / (self._reference / self._every)
        taken = {"times": self._calls, "seconds": seconds, "cpu_seconds": cpu, "work": work}
        self.samples.append(taken | sample(self._directory))
        self._reference, self._begin = 0.0, self._clocks()


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this thread."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def reference() -> None:
    """The same work each time, of what a save is made of: Python, text, files and memory."""
    record = {str(i): {"shape": [i, 4], "name": "a" * 50} for i in range(100)}
    with tempfile.TemporaryDirectory() as directory:
        for i in range(5):
            path = Path(directory) / f"{i}.json"
            path.write_text(json.dumps(record))
            json.loads(path.read_text())
    np.ones(1 << 18).copy()


def trainer(directory: Path, times: int, record: Recorder) -> None:
    """A step with a save of everything each time, evaluations, both exports, metrics and a mixture."""
    model = tiny.llama(num_layers=1, rope=ops.Rope(12, max_length=64))
    train(model, directory, times, record, optimizer=training.adamw(1e-3, mask=training.decay_mask(model)))


def short(directory: Path, times: int, record: Recorder) -> None:
    """The same with the smallest model that is one and an optimizer without moments: the fewest arrays to save."""
    train(Smallest(rngs=nnx.Rngs(0)), directory, times, record, optimizer=optax.sgd(1e-3), hugging_face=False)


def train(
    model: Any, directory: Path, times: int, record: Recorder, *, optimizer: Any, hugging_face: bool = True
) -> None:
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


def generator(directory: Path, times: int, record: Recorder) -> None:
    """Texts of mixed lengths."""
    rng = np.random.default_rng(0)
    ours = inference.Generator(tiny.llama(rope=ops.Rope(12)), dtype=jnp.float32)
    for _ in range(times):
        rows = [rng.integers(0, tiny.VOCAB, n).tolist() for n in rng.integers(1, 30, rng.choice([1, 2, 4]))]
        ours.generate(rows, max_new_tokens=int(rng.integers(1, 9)))
        record()


def weights(directory: Path, times: int, record: Recorder) -> None:
    """Models written and read again."""
    model = tiny.llama(rope=ops.Rope(12, max_length=64))
    for _ in range(times):
        maxlib.save_pretrained(model, directory / "model", overwrite=True)
        model = maxlib.from_pretrained(directory / "model")
        record()


def loader(directory: Path, times: int, record: Recorder) -> None:
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
    with tempfile.TemporaryDirectory() as root:
        record = Recorder(Path(root), max(1, times // samples))
        with contextlib.suppress(KeyboardInterrupt, distributed.Interrupted):
            PARTS[part](Path(root), times, record)
        return record.samples


def slopes(samples: list[Sample]) -> dict[str, float]:
    """Growth per repeat after the first fifth, by least squares; of seconds, the last tenth over the first, less 1."""
    late = samples[len(samples) // 5 :]
    times = np.array([s["times"] for s in late])
    found = {name: float(np.polyfit(times, [s[name] for s in late], 1)[0]) for name in late[0] if name != "times"}
    tenth = max(1, len(late) // 10)
    last, first = (
        np.median([[s[name] for name in CLOCKS] for s in part], axis=0) for part in (late[-tenth:], late[:tenth])
    )
    return found | dict(zip(CLOCKS, (last / first - 1).tolist(), strict=True))


def failures(samples: list[Sample], limits: Mapping[str, float] = LIMITS) -> list[str]:
    """What grows that must not, after the first fifth."""
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
    slower = [name for name in SLOWER if late[-1]["times"] >= LONG and grown[name] > SLOWER[name]]
    return bad + [f"{name} of a repeat grew by {grown[name]:.1%}, limit {SLOWER[name]:.0%}" for name in slower]


def draw(found: dict[str, list[Sample]], path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = {"threads": 1, "descriptors": 1, "rss_kib": 1024, "in_use_kib": 1024, "python_blocks": 1e6, "work": 1}
    labels = (
        "threads",
        "descriptors",
        "resident, MiB",
        "in use, MiB",
        "Python's blocks, millions",
        "CPU time of a repeat, in units of a fixed work",
    )
    figure, axes = plt.subplots(len(rows), len(found), figsize=(4 * len(found), 11), squeeze=False, sharex="col")
    for column, (part, samples) in enumerate(found.items()):
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
    chosen = options.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    found: dict[str, Any] = {}
    bad: list[str] = []
    for part in chosen.parts:
        times = max(FEWEST[part], round(TIMES.get(part, 0) * chosen.share))
        # In so short a run the arenas of new threads are not filled yet: what is in use says more than what is
        # resident.
        limits = LIMITS if times >= 300 else SHORT_LIMITS
        samples = run(part, times, SAMPLES if times >= 300 else 15)
        found[part] = samples
        print(part, json.dumps({"samples": samples[:: max(1, len(samples) // 10)]}), flush=True)
        print(part, json.dumps({"first": samples[0], "last": samples[-1], "growth": slopes(samples)}), flush=True)
        bad += [f"{part}: {problem}" for problem in failures(samples, limits)]
    if chosen.draw:
        draw(found, chosen.draw)
    print("\n".join(bad) or "nothing grows")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
