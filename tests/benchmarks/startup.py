"""Startup times: the import, and the first training step of models of different depth.

    python -m tests.benchmarks.startup [--layers 2 8 32] [--rounds 3]

Each import is timed in a process of its own, after `import jax, flax.nnx`. First steps are timed from construction to
the end of step one.
"""

import argparse
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import ops, training
from maxlib.models import llama

IMPORT = "import jax, flax.nnx, time; t = time.perf_counter(); import maxlib; print(time.perf_counter() - t)"


def import_seconds(rounds: int) -> float:
    run = lambda: float(
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    )
    return statistics.median(run() for _ in range(rounds))


def first_step_seconds(layers: int) -> float:
    """Tiny layers, so that tracing and compilation dominate."""
    jax.clear_caches()
    begin = time.perf_counter()
    cfg = llama.Config(
        vocab=64, num_layers=layers, dim=32, mlp_dim=64, num_heads=2, num_kv_heads=2, head_dim=16, rope=ops.Rope(16)
    )
    model = jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))()
    optimizer = training.adamw(1e-3, mask=training.decay_mask(model))
    state = training.make_state(model, optimizer)
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer))
    tokens = jnp.zeros((2, 16), jnp.int32)
    jax.block_until_ready(step(state, {"tokens": tokens, "targets": tokens}))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"import maxlib, after jax and flax.nnx: {1000 * import_seconds(args.rounds):.1f} ms")
    times = {layers: [] for layers in args.layers}
    first_step_seconds(args.layers[0])  # what the process itself needs once
    for _ in range(args.rounds):
        for layers in args.layers:
            times[layers].append(first_step_seconds(layers))
    for layers, seconds in times.items():
        print(f"{layers:3} layers: first step after {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
