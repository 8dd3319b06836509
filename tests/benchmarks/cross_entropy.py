"""Forward plus backward of the loss: maxlib against a plain JAX loss and torch, interleaved on the same machine.

    python tests/benchmarks/cross_entropy.py [--tokens 2048 --dim 512 --vocab 32000 --chunks 256 1024] [--json out.json]

Each round runs every contender once; ratios are medians over rounds of (torch time / own time) in the same round.
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
from rich.console import Console
from rich.table import Table

from maxlib.ops import fused_linear_cross_entropy


def plain_loss(hidden, weight, targets):
    logits = jnp.einsum("md,vd->mv", hidden, weight, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=1) - picked)


def matmuls(hidden, weight, targets):
    """Runs the three matmuls only, chunk by chunk: a lower bound for the time of any loss."""

    def step(total, h):
        logits = h @ weight.T
        return total + logits.T @ h, logits @ weight

    chunks = hidden.reshape(-1, min(512, hidden.shape[0]), hidden.shape[1])
    return jax.lax.scan(step, jnp.zeros_like(weight), chunks)


def jax_contenders(args, inputs):
    def chunked(chunk):
        return lambda h, w, y: fused_linear_cross_entropy(h, w, y, chunk=chunk).loss

    losses = {f"maxlib chunk={c}": chunked(c) for c in args.chunks} | {"plain JAX": plain_loss}
    steps = {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()} | {"matmuls alone": matmuls}
    runs, memory = {}, {}
    for name, step in steps.items():
        compiled = jax.jit(step).lower(*inputs).compile()
        memory[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        runs[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*inputs))
    return runs, memory


def torch_contender(inputs):
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    hidden, weight = (torch.tensor(np.asarray(x, np.float32)).requires_grad_() for x in inputs[:2])
    targets = torch.tensor(np.asarray(inputs[2], np.int64))

    def run():
        hidden.grad = weight.grad = None
        logits = torch.nn.functional.linear(hidden, weight)
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()

    return {"torch": run}


def measure(runs, rounds: int) -> dict[str, list[float]]:
    times = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def report(times, memory, flops: float) -> list[dict]:
    base = times.get("torch", times["plain JAX"])
    return [
        {
            "name": name,
            "best_s": min(seconds),
            "median_s": statistics.median(seconds),
            "ratio": statistics.median(b / s for b, s in zip(base, seconds, strict=True)),
            "gflops": flops / min(seconds) / 1e9,
            "temp_mib": memory.get(name),
        }
        for name, seconds in times.items()
    ]


def show(rows: list[dict], base: str) -> None:
    table = Table("", "best s", "median s", f"speed / {base}", "GFLOP/s", "temp MiB", title="loss, forward + backward")
    for row in rows:
        temp = "" if row["temp_mib"] is None else f"{row['temp_mib']:.0f}"
        numbers = f"{row['best_s']:.3f}", f"{row['median_s']:.3f}", f"{row['ratio']:.2f}", f"{row['gflops']:.0f}"
        table.add_row(row["name"], *numbers, temp)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (args.tokens, args.dim), args.dtype)
    weight = jax.random.normal(keys[1], (args.vocab, args.dim), args.dtype) * args.dim**-0.5
    targets = jax.random.randint(keys[2], (args.tokens,), 0, args.vocab)
    runs, memory = jax_contenders(args, (hidden, weight, targets))
    runs |= torch_contender((hidden, weight, targets))
    rows = report(measure(runs, args.rounds), memory, 6 * args.tokens * args.dim * args.vocab)
    show(rows, "torch" if "torch" in runs else "plain JAX")
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({"jax": jax.__version__, **machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
