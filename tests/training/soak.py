"""Runs what a long run does again and again, and fits a line to all that a process holds: threads, open files, memory.

`python -m tests.training.soak [trainer generator weights loader] [--share 0.05] [--draw docs/soak.png]`; the numbers of
docs/reliability.md are those of the whole, under `ulimit -n 256`.
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import maxlib
from maxlib import checkpoint, data, inference, ops, training
from tests.training import tiny

TIMES = {"trainer": 3000, "generator": 2000, "weights": 200, "loader": 500}
FEWEST = {"trainer": 60, "generator": 40, "weights": 12, "loader": 20}
SAMPLES = 60
Sample = dict[str, float]


def sample(directory: Path) -> Sample:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rss_kib": pages * os.sysconf("SC_PAGESIZE") / 1024,
        "shm_files": len(os.listdir("/dev/shm")),
        "files": sum(len(files) for _, _, files in os.walk(directory)),
    }


def trainer(directory: Path, times: int) -> Iterator[None]:
    """A step with a save of everything each time, evaluations, both exports, metrics and a mixture."""
    model = tiny.llama(rope=ops.Rope(12, max_length=64))
    ticks: list[None] = []
    ours = training.Trainer(
        model,
        optimizer=training.adamw(1e-3, mask=training.decay_mask(model)),
        loss=tiny.loss,
        loader=loader_of(seed=0),
        evaluation=training.Evaluation(loader_of(seed=1, num_batches=2), every=10),
        directory=directory,
        checkpointer=checkpoint.Checkpointer(directory / "run", every=1, keep=2, best=checkpoint.Best("eval/loss")),
        callbacks=[
            (1, lambda _: ticks.append(None)),
            training.HuggingFaceExport(directory / "exports", every=25, keep=2),
            training.ParameterExport(directory / "parameters", every=25, keep=2),
        ],
    )
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        for step in range(1, times + 1, max(1, times // SAMPLES)):
            ours.fit(step)
            ours.checkpointer.wait()
            yield from ticks
            ticks.clear()
        ours.checkpointer.close()


def generator(directory: Path, times: int) -> Iterator[None]:
    """Texts of mixed lengths."""
    rng = np.random.default_rng(0)
    ours = inference.Generator(tiny.llama(rope=ops.Rope(12)), dtype=jnp.float32)
    for _ in range(times):
        rows = [rng.integers(0, tiny.VOCAB, n).tolist() for n in rng.integers(1, 30, rng.choice([1, 2, 4]))]
        ours.generate(rows, max_new_tokens=int(rng.integers(1, 9)))
        yield


def weights(directory: Path, times: int) -> Iterator[None]:
    """Models written and read again."""
    model = tiny.llama(rope=ops.Rope(12, max_length=64))
    for _ in range(times):
        maxlib.save_pretrained(model, directory / "model", overwrite=True)
        model = maxlib.from_pretrained(directory / "model")
        yield


def loader(directory: Path, times: int) -> Iterator[None]:
    """Epochs, each from a state that was saved."""
    ours = loader_of(seed=0, num_batches=5)
    for _ in range(times):
        ours.reset()
        next(ours)
        ours.set_state(ours.get_state())
        assert len(list(ours)) == 4
        yield


def loader_of(*, seed: int, num_batches: int | None = None) -> data.Loader:
    rng = np.random.default_rng(seed)
    texts = lambda: data.in_memory([rng.integers(0, tiny.VOCAB, n).tolist() for n in rng.integers(3, 20, 50)])
    mixture = data.Mixture({"a": texts(), "b": texts()}, weights={"a": 2, "b": 1}, seed=seed)
    rows = lambda part: data.pack(mixture[part], length=12, bins=4)
    return data.Loader(rows, batch_size=4, num_shards=2, num_batches=num_batches)


PARTS: dict[str, Callable[[Path, int], Iterator[None]]] = {f.__name__: f for f in (trainer, generator, weights, loader)}


def run(part: str, times: int) -> list[Sample]:
    """The samples of one part, each with the number of repeats before it and the seconds that one of them took."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as root:
        every, begin, before = max(1, times // SAMPLES), time.monotonic(), 0
        for i, _ in enumerate(PARTS[part](Path(root), times), 1):
            if i % every == 0:
                seconds = (time.monotonic() - begin) / (i - before)
                samples.append({"times": i, "seconds": seconds, **sample(Path(root))})
                begin, before = time.monotonic(), i
    return samples


def slopes(samples: list[Sample]) -> dict[str, float]:
    """Growth per repeat after the first fifth, by least squares; for the seconds the last tenth against the first."""
    late = samples[len(samples) // 5 :]
    times = np.array([s["times"] for s in late])
    found = {name: float(np.polyfit(times, [s[name] for s in late], 1)[0]) for name in late[0] if name != "times"}
    tenth = max(1, len(late) // 10)
    seconds = [s["seconds"] for s in late]
    return found | {"seconds": float(np.median(seconds[-tenth:]) / np.median(seconds[:tenth])) - 1}


def failures(samples: list[Sample]) -> list[str]:
    """What grows that must not: nothing that the system counts after the first fifth, memory by 20 KiB a repeat."""
    late, grown = samples[len(samples) // 5 :], slopes(samples)
    bad = [
        f"{name} went from {late[0][name]:.0f} to {late[-1][name]:.0f}"
        for name in ("python threads", "descriptors", "shm_files")
        if late[-1][name] > late[0][name]
    ]
    bad += [f"{name} grow by {grown[name]:.3f} a repeat" for name in ("threads",) if grown[name] > 0.02]
    return bad + ([f"memory grows by {grown['rss_kib']:.1f} KiB a repeat"] if grown["rss_kib"] > 20 else [])


def draw(found: dict[str, list[Sample]], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = ("threads", "descriptors", "rss_kib", "seconds")
    figure, axes = plt.subplots(len(names), len(found), figsize=(4 * len(found), 8), squeeze=False, sharex="col")
    for column, (part, samples) in enumerate(found.items()):
        for row, name in enumerate(names):
            axes[row][column].plot([s["times"] for s in samples], [s[name] for s in samples], color="#4477aa")
            axes[row][column].set_ylim(bottom=0)
            axes[row][0].set_ylabel(name)
        axes[0][column].set_title(part)
        axes[-1][column].set_xlabel("repeats")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser()
    options.add_argument("parts", nargs="*", default=list(PARTS))
    options.add_argument("--share", type=float, default=1.0, help="of the number of repeats")
    options.add_argument("--draw", type=Path)
    chosen = options.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    found: dict[str, Any] = {}
    bad: list[str] = []
    for part in chosen.parts:
        samples = run(part, max(FEWEST[part], round(TIMES[part] * chosen.share)))
        found[part] = samples
        print(part, json.dumps({"first": samples[0], "last": samples[-1], "growth": slopes(samples)}), flush=True)
        bad += [f"{part}: {problem}" for problem in failures(samples)]
    if chosen.draw:
        draw(found, chosen.draw)
    print("\n".join(bad) or "nothing grows")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
