"""What this machine can do: the limits that benchmarks are compared with.

python -m tests.benchmarks.machine
"""

import platform
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.benchmarks.timing import measure

SIZE = 2048  # of the square matrices
MEGABYTES = 512  # read once; no cache holds them


def speeds(rounds: int = 5) -> dict[str, float]:
    """Returns GFLOP/s of a float32 matmul in XLA and in torch, and GB/s of reading memory, measured in turn."""
    x = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    ours, theirs = jnp.asarray(x), torch.from_numpy(x)
    matmul, total = jax.jit(lambda x: x @ x), jax.jit(jnp.sum)
    memory = jnp.ones(MEGABYTES * 2**20 // 4, jnp.float32)
    runs = {
        "XLA": lambda: jax.block_until_ready(matmul(ours)),
        "torch": lambda: theirs @ theirs,
        "memory": lambda: jax.block_until_ready(total(memory)),
    }
    seconds = {name: statistics.median(times) for name, times in measure(runs, rounds).items()}
    flops = 2 * SIZE**3 / 1e9
    return {
        "XLA GFLOP/s": flops / seconds["XLA"],
        "torch GFLOP/s": flops / seconds["torch"],
        "memory GB/s": MEGABYTES * 2**20 / 1e9 / seconds["memory"],
    }


def describe() -> str:
    """Returns a line about the machine: its processor, AVX-512 or not, and `speeds`."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    name = f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
    vectors = "AVX-512" if "avx512f" in text else "no AVX-512"
    measured = ", ".join(f"{what} {speed:.0f}" for what, speed in speeds().items())
    return f"{name}, {vectors}; {measured}; jax {jax.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    print(describe())
