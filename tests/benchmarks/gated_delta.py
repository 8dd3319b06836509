"""Gated delta rule, Kimi delta attention or state-space duality: chunks against the definition, in turn on one machine,
and the memory of a training step.

    python -m tests.benchmarks.gated_delta [--op ssd|kimi_delta_attention] [--tokens 8192] [--rounds 3]

Times are medians of rounds in which each contender runs once. Memory is what XLA allocates beside arguments and results
for the forward and backward pass.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from maxlib import ops

KEYS, HEADS = 2, 4
OP = "gated_delta_rule"


def arrays(tokens: int, width: int, key_width: int | None = None) -> dict[str, jax.Array]:
    made = {"ssd": ssd_arrays, "kimi_delta_attention": kimi_arrays}.get(OP, delta_arrays)
    return made(tokens, width, key_width or width)


def ssd_arrays(tokens: int, width: int, state_width: int) -> dict[str, jax.Array]:
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), (1, tokens, *shape))
    return {
        "x": normal(0, HEADS, width),
        "dt": jax.nn.softplus(normal(1, HEADS)),
        "a": jnp.full(HEADS, -0.05),
        "b": normal(2, KEYS, state_width),
        "c": normal(3, KEYS, state_width),
    }


def delta_arrays(tokens: int, width: int, key_width: int) -> dict[str, jax.Array]:
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), (1, tokens, *shape))
    return {
        "q": normal(0, KEYS, key_width),
        "k": normal(1, KEYS, key_width),
        "v": normal(2, HEADS, width),
        "log_decay": -0.05 * jax.nn.softplus(normal(3, HEADS)),
        "beta": jax.nn.sigmoid(normal(4, HEADS)),
    }


def kimi_arrays(tokens: int, width: int, key_width: int) -> dict[str, jax.Array]:
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), (1, tokens, HEADS, *shape))
    return {
        "q": normal(0, key_width),
        "k": normal(1, key_width),
        "v": normal(2, width),
        "log_decay": -0.05 * jax.nn.softplus(normal(3, key_width)),
        "beta": jax.nn.sigmoid(normal(4)),
    }


def compiled(implementation: str, x: dict[str, jax.Array], *, backward: bool):
    loss = lambda x: jnp.sum(getattr(ops, OP)(**x, implementation=implementation)[0] ** 2)
    return jax.jit(jax.grad(loss) if backward else loss).lower(x).compile()


def seconds(run, x) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - begin


def speed(tokens: int, width: int, rounds: int) -> Table:
    table = Table("pass", "chunked s", "sequential s", "ratio", title=f"{tokens} tokens, {HEADS} heads of {width}")
    x = arrays(tokens, width)
    for backward in (False, True):
        runs = {name: compiled(name, x, backward=backward) for name in ("chunked", "sequential")}
        for run in runs.values():
            seconds(run, x)  # once to warm up
        found = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(seconds(run, x))
        chunked, sequential = (statistics.median(found[name]) for name in runs)
        ratio = statistics.median(s / c for c, s in zip(found["chunked"], found["sequential"], strict=True))
        table.add_row(
            "forward, backward" if backward else "forward", f"{chunked:.3f}", f"{sequential:.3f}", f"{ratio:.1f}"
        )
    return table


def memory(width: int) -> Table:
    table = Table(
        "tokens", "chunked MiB", "keys half as wide", "sequential MiB", title="temporary memory of both passes"
    )
    for tokens in (2048, 4096, 8192, 16384):
        mib = lambda name, x: f"{compiled(name, x, backward=True).memory_analysis().temp_size_in_bytes / 2**20:.0f}"
        shapes = lambda *sizes: jax.eval_shape(lambda: arrays(*sizes))
        whole = shapes(tokens, width)
        table.add_row(
            str(tokens),
            mib("chunked", whole),
            mib("chunked", shapes(tokens, width, width // 2)),
            mib("sequential", whole),
        )
    return table


def main() -> None:
    global OP
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", default=OP, choices=("gated_delta_rule", "kimi_delta_attention", "ssd"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    OP = args.op
    console = Console()
    console.print(memory(args.width))
    console.print(speed(args.tokens, args.width, args.rounds))


if __name__ == "__main__":
    main()
