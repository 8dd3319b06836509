"""Grouped matmul on one NVIDIA GPU: TFLOP/s of maxlib's kernels and XLA against the dense matmul of the same useful
size, in one run.

    python -m tests.benchmarks.grouped_matmul_gpu [--rounds 20] [--json out.json]

8,192 rows, 16 experts of 4096 x 2048, bfloat16, rows spread evenly, unevenly, and over half of the experts. Forward,
and the gradients of rows and weights. The bar: 80% of the dense matmul.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from maxlib.ops.grouped_matmul import grouped_matmul
from tests.benchmarks.attention_gpu import attempt, take_turns

M, E, I, O = 8192, 16, 4096, 2048
COUNTS = {
    "even": np.full(E, M // E),
    "uneven": np.random.default_rng(0).multinomial(M, np.random.default_rng(1).dirichlet(np.ones(E))),
    "half of the experts": np.repeat([2 * M // E, 0], E // 2),
}
NAMES = ["mosaic_gpu", "tiled", "ragged_dot", "dense"]


def compile_one(name: str, counts) -> dict:
    """Compiled calls by phase."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (M, I), (O, I) if name == "dense" else (E, O, I), (M, O)
    rows, weights, d_out = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    multiply = lambda rows, weights: grouped_matmul(rows, weights, counts, implementation=name)
    if name == "dense":
        multiply = lambda rows, weights: rows @ weights.T
    forward = jax.jit(multiply).lower(rows, weights).compile()
    gradients = jax.jit(lambda r, w, d: jax.vjp(multiply, r, w)[1](d)).lower(rows, weights, d_out).compile()
    return {
        "forward": lambda: jax.block_until_ready(forward(rows, weights)),
        "gradients": lambda: jax.block_until_ready(gradients(rows, weights, d_out)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.exit(0, f"Nothing measured: this needs an NVIDIA GPU, jax found {device.platform}.\n")
    results, shown = [], Table("rows", "phase", "contender", "median ms", "TFLOP/s", "of dense")
    for about, counts in COUNTS.items():
        runs = {name: attempt(lambda name=name, c=jnp.asarray(counts): compile_one(name, c)) for name in NAMES}
        for phase, matmuls in {"forward": 1, "gradients": 2}.items():
            here = {name: found if isinstance(found, str) else found[phase] for name, found in runs.items()}
            seconds = take_turns(here, args.rounds)
            for name, median in seconds.items():
                speed = 2e-12 * matmuls * M * I * O / median
                row = {"rows": about, "phase": phase, "contender": name, "ms": 1e3 * median, "tflops": speed}
                results.append(row | {"of_dense": seconds["dense"] / median})
                shown.add_row(
                    about, phase, name, f"{1e3 * median:.3f}", f"{speed:.0f}", f"{seconds['dense'] / median:.2f}"
                )
        results += [{"rows": about, "contender": n, "left_out": why} for n, why in runs.items() if isinstance(why, str)]
    Console().print(shown)
    print("\n".join(f"left out: {row}" for row in results if "left_out" in row))
    if args.json:
        args.json.write_text(
            json.dumps({"jax": jax.__version__, "device": device.device_kind, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
