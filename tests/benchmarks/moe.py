"""Forward plus backward of a dropless mixture of experts against a dense MLP of the active size, and of the grouped
matmul against a Python loop of dense matmuls over the same rows; interleaved on the same machine.

    python tests/benchmarks/moe.py [--tokens 2048 --dim 512 --mlp-dim 1024 --experts 8 --top-k 2] [--json out.json]

Each round runs every contender once; ratios are medians over rounds of (own time / opponent's time) in the same round.
The loop's row counts are constants of its program and its weights are separate arrays: the best that XLA can do, but
compiled anew for each routing.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from maxlib import nn, ops


def trained(f, *args):
    """Forward and all gradients, compiled: a function without arguments and the bytes of its temporaries."""

    def step(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jax.tree.map(jnp.ones_like, y))

    compiled = jax.jit(step).lower(*args).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return (lambda: jax.block_until_ready(compiled(*args))), temp


def layers(args):
    """MoE layers, and a dense one with the same multiplications per token (routing apart)."""
    x = jax.random.normal(jax.random.key(0), (args.batch, args.tokens // args.batch, args.dim), args.dtype)
    router = lambda: nn.Router(args.dim, args.experts, top_k=args.top_k, rngs=nnx.Rngs(1))
    make = lambda **more: nn.MoE(args.dim, args.mlp_dim, router=router(), rngs=nnx.Rngs(0), **more)
    dense = jax.jit(lambda: nn.GatedMLP(args.dim, args.top_k * args.mlp_dim, rngs=nnx.Rngs(0)))()
    moe, dropping = jax.jit(make)(), jax.jit(lambda: make(capacity_factor=1.25))()
    values, rest = nn.partition(moe)
    values_d, rest_d = nn.partition(dropping)
    return {
        "dense MLP": trained(lambda m, x: m(x), dense, x),
        "MoE dropless": trained(lambda v, x: nn.combine(v, rest)(x)[0], values, x),
        "MoE capacity 1.25": trained(lambda v, x: nn.combine(v, rest_d)(x)[0], values_d, x),
    }


def matmuls(args):
    rows = args.tokens * args.top_k
    rng = np.random.default_rng(0)
    counts = rng.multinomial(
        rows, rng.dirichlet(np.full(args.experts, 4.0))
    )  # some experts have several times the rows of others
    x = jnp.asarray(rng.normal(size=(rows, args.dim)), args.dtype)
    w = jnp.asarray(rng.normal(size=(args.experts, args.mlp_dim, args.dim)), args.dtype)
    bounds = np.cumsum(counts)[:-1]
    parts = [jnp.asarray(part) for part in np.split(np.asarray(x), bounds)]
    grouped = lambda x, w: ops.grouped_matmul(x, w, jnp.asarray(counts))
    loop = lambda parts, ws: [part @ w.T for part, w in zip(parts, ws, strict=True)]
    return {
        "loop of matmuls": trained(loop, parts, list(w)),
        "grouped_matmul": trained(grouped, x, w),
        "one dense matmul": trained(lambda x, w: x @ w.T, x, w[0]),
    }


def measure(runs, rounds: int) -> dict[str, list[float]]:
    times = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, (run, _) in runs.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def report(title: str, runs, rounds: int) -> list[dict]:
    times = measure(runs, rounds)
    base = next(iter(times.values()))
    table = Table(
        "", "best s", "median s", f"time / {next(iter(times))}", "temp MiB", title=f"{title}, forward + backward"
    )
    rows = []
    for name, seconds in times.items():
        ratio = statistics.median(s / b for s, b in zip(seconds, base, strict=True))
        rows.append({"name": name, "best_s": min(seconds), "ratio": ratio, "temp_mib": runs[name][1]})
        numbers = f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", f"{ratio:.2f}", f"{runs[name][1]:.0f}"
        table.add_row(name, *numbers)
    Console().print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(tokens=2048, batch=4, dim=512, mlp_dim=1024, experts=8, top_k=2, rounds=9).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = report("layer", layers(args), args.rounds) + report("matmul", matmuls(args), args.rounds)
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({"jax": jax.__version__, **machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
