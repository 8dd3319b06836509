"""Grouped matmul on one NVIDIA GPU: TFLOP/s of maxlib's kernels and XLA against the dense matmul of the same useful
size, in one run.

    python -m tests.benchmarks.grouped_matmul_gpu [--rounds 20] [--json out.json]

8,192 rows, 16 experts of 4096 x 2048, bfloat16, rows spread evenly, unevenly, and over half of the experts: one matmul,
and gate and up with SwiGLU ("two matmuls" is what its kernel replaces). Forward (values alone), and the gradients of
rows and weights. The bar: 80% of the dense matmul, and for gate and up less time than two matmuls.
"""

import argparse
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from maxlib.ops._glu import swiglu
from maxlib.ops._grouped_matmul import grouped_glu, grouped_matmul
from tests.benchmarks.attention_gpu import attempt, take_turns

M, E, I, O = 8192, 16, 4096, 2048
COUNTS = {
    "even": np.full(E, M // E),
    "uneven": np.random.default_rng(0).multinomial(M, np.random.default_rng(1).dirichlet(np.ones(E))),
    "half of the experts": np.repeat([2 * M // E, 0], E // 2),
}
NAMES = {
    "matmul": ["mosaic_gpu", "tiled", "ragged_dot", "dense"],
    "SwiGLU": ["mosaic_gpu", "two matmuls", "tiled", "ragged_dot", "dense"],
}
MATMULS = {"matmul": {"forward": 1, "gradients": 2}, "SwiGLU": {"forward": 2, "gradients": 6}}  # with gate and up again


def contender(op: str, name: str, counts):
    """A function of rows and a list of weights."""
    one = functools.partial(
        grouped_matmul, rows_per_expert=counts, implementation="mosaic_gpu" if name == "two matmuls" else name
    )
    if name == "dense":
        one = lambda rows, w: rows @ w.T
    if op == "matmul":
        return lambda rows, weights: one(rows, weights[0])
    if name in ("dense", "two matmuls"):
        return lambda rows, weights: swiglu(*(one(rows, w) for w in weights))
    return lambda rows, weights: grouped_glu(rows, *weights, counts, implementation=name)


def compile_one(op: str, name: str, counts) -> dict:
    """Compiled calls by phase."""
    keys = jax.random.split(jax.random.key(0), 4)
    matrix = (O, I) if name == "dense" else (E, O, I)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    rows, d_out = draw(keys[0], M, I), draw(keys[1], M, O)
    weights = [draw(key, *matrix) for key in keys[2 : 3 if op == "matmul" else 4]]
    run = contender(op, name, counts)
    forward = jax.jit(run).lower(rows, weights).compile()
    gradients = jax.jit(lambda r, w, d: jax.vjp(run, r, w)[1](d)).lower(rows, weights, d_out).compile()
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
    results, shown = [], Table("op", "rows", "phase", "contender", "median ms", "TFLOP/s", "of dense")
    for op, (about, counts) in itertools.product(NAMES, COUNTS.items()):
        runs = {n: attempt(functools.partial(compile_one, op, n, jnp.asarray(counts))) for n in NAMES[op]}
        for phase, matmuls in MATMULS[op].items():
            here = {name: found if isinstance(found, str) else found[phase] for name, found in runs.items()}
            seconds = take_turns(here, args.rounds)
            for name, median in seconds.items():
                speed = 2e-12 * matmuls * M * I * O / median
                row = {"op": op, "rows": about, "phase": phase, "contender": name, "ms": 1e3 * median, "tflops": speed}
                results.append(row | {"of_dense": seconds["dense"] / median})
                of_dense = f"{seconds['dense'] / median:.2f}"
                shown.add_row(op, about, phase, name, f"{1e3 * median:.3f}", f"{speed:.0f}", of_dense)
        left_out = {name: why for name, why in runs.items() if isinstance(why, str)}
        results += [{"op": op, "rows": about, "contender": n, "left_out": why} for n, why in left_out.items()]
    Console().print(shown)
    print("\n".join(f"left out: {row}" for row in results if "left_out" in row))
    if args.json:
        args.json.write_text(
            json.dumps({"jax": jax.__version__, "device": device.device_kind, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
