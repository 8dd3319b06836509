"""Saving and restoring: how long a save keeps the training waiting, and what checksums add to it.

    python -m tests.benchmarks.checkpoint [--megabytes 800 --rounds 3 --directory DIR]

Each round saves and restores once with checksums and once without; ratios are medians over rounds. Needs 3x the size on
disk.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

from maxlib.checkpoint import Checkpointer
from maxlib.checkpoint import _checksum as checksum
from maxlib.checkpoint import _records as records

STEPS = ("save returns", "on disk", "restored")


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def without_checksums() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(checksum, "digest", return_value=(jnp.uint32(0), jnp.uint32(0))))
    stack.enter_context(mock.patch.object(records, "damaged", return_value=[]))
    return stack


def measure(items: dict, directory: str) -> list[float]:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), items)
    with tempfile.TemporaryDirectory(dir=directory) as run, Checkpointer(run) as ck:
        begin = time.perf_counter()
        returns = seconds(lambda: ck.save(1, items))
        ck.wait()
        on_disk = time.perf_counter() - begin
        restored = seconds(lambda: jax.block_until_ready(ck.restore(1, like)["params"]))
    return [returns, on_disk, restored]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where to write (default: the system's temporary directory)")
    args = parser.parse_args()
    make = jax.jit(lambda key: jax.random.normal(key, (8, 1024, 1024)))  # 33.5 MB
    keys = jax.random.split(jax.random.key(0), max(1, round(args.megabytes / 33.554)))
    items = jax.block_until_ready({"params": {f"w{i}": make(key) for i, key in enumerate(keys)}})
    size = sum(x.nbytes for x in jax.tree.leaves(items)) / 1e6
    sums = lambda: [checksum.to_hex(checksum.digest(x)) for x in jax.tree.leaves(items)]
    sums()
    print(f"{size:.0f} MB in {len(keys)} arrays; all checksums {min(seconds(sums) for _ in range(3)):.3f} s")
    measure(items, args.directory)  # compiles
    with_sums, without = [], []
    for _ in range(args.rounds):
        with_sums.append(measure(items, args.directory))
        with without_checksums():
            without.append(measure(items, args.directory))
    for name, a, b in zip(STEPS, zip(*with_sums, strict=True), zip(*without, strict=True), strict=True):
        ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
        print(
            f"{name:13} {statistics.median(a):7.3f} s with checksums, {statistics.median(b):7.3f} s without: {ratio:.2f}x"
        )


if __name__ == "__main__":
    main()
