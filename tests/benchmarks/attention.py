"""Attention: maxlib's implementations against `jax.nn.dot_product_attention` and torch, interleaved on one machine.

    python -m tests.benchmarks.attention [--cases train long window decode bf16] [--rounds 5] [--json out.json]

Each round runs every contender once; ratios are medians over rounds of (own time / chunked's time) in the same round.
"""

import argparse
import dataclasses
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

from maxlib.ops import attention


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. Causal, with `queries` at the end of `keys`; backward too, unless decoding."""

    about: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: str = "float32"
    backward: bool = True
    rounds: int | None = None
    implementations: tuple[str, ...] = ("chunked", "reference")

    def bounds(self):
        ends = np.arange(1, self.queries + 1, dtype=np.int32) + self.keys - self.queries
        starts = np.zeros_like(ends) if self.window is None else np.maximum(ends - self.window, 0)
        return tuple(jnp.asarray(np.broadcast_to(e, (self.batch, self.queries))) for e in (starts, ends))

    def arrays(self):
        rng = np.random.default_rng(0)
        B, T, S, N, K, H = self.batch, self.queries, self.keys, self.heads, self.kv_heads, self.head_dim
        return [rng.standard_normal(s, np.float32) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))]


CASES = {
    "train": Case("forward + backward, one layer of the Llama bench", 4, 512, 512, 8, 8, 64),
    "gqa": Case("forward + backward, grouped heads", 1, 1024, 1024, 16, 4, 128),
    "long": Case("forward + backward at 8k", 1, 8192, 8192, 2, 2, 64, rounds=1),
    "window": Case("forward + backward at 8k, window 1k", 1, 8192, 8192, 2, 2, 64, window=1024, rounds=1),
    "decode": Case("one token against a cache of 8k", 1, 1, 8192, 32, 8, 128, backward=False),
    "bf16": Case("forward + backward in bfloat16", 4, 512, 512, 8, 8, 64, dtype="bfloat16"),
}


def jax_contenders(case: Case):
    """Runs and temporary MiB of our implementations and of jax.nn's."""
    bounds = case.bounds()
    q, k, v, d_out = (jnp.asarray(x, case.dtype) for x in case.arrays())

    def ours(name):
        return lambda q, k, v, start, end: attention(q, k, v, k_start=start, k_end=end, implementation=name)

    def theirs(q, k, v, start, end):
        window = None if case.window is None else (case.window - 1, 0)
        if case.queries > 1:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=end[:, -1])

    calls = {name: ours(name) for name in case.implementations} | {"jax.nn": theirs}
    runs, memory = {}, {}
    for name, call in calls.items():
        compiled = jax.jit(step(call, case.backward)).lower(q, k, v, *bounds, d_out).compile()
        analysis = compiled.memory_analysis()
        memory[name] = None if analysis is None else analysis.temp_size_in_bytes / 2**20
        runs[name] = lambda compiled=compiled: jax.block_until_ready(compiled(q, k, v, *bounds, d_out))
    return runs, memory


def step(call, backward: bool):
    if not backward:
        return lambda q, k, v, start, end, d_out: call(q, k, v, start, end)

    def both(q, k, v, start, end, d_out):
        out, vjp = jax.vjp(lambda q, k, v: call(q, k, v, start, end), q, k, v)
        return out, vjp(d_out)

    return both


def torch_contender(case: Case):
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    q, k, v, d_out = (
        torch.tensor(x).transpose(1, 2).contiguous().to(getattr(torch, case.dtype)).requires_grad_(case.backward)
        for x in case.arrays()
    )
    mask = None
    if case.window is not None:
        distance = torch.arange(case.keys)[:, None] - torch.arange(case.keys)[None]
        mask = (distance >= 0) & (distance < case.window)
    options = {
        "is_causal": mask is None and case.queries > 1,
        "attn_mask": mask,
        "enable_gqa": case.heads != case.kv_heads,
    }

    def run():
        with torch.set_grad_enabled(case.backward):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        if case.backward:
            torch.autograd.grad(out, (q, k, v), d_out)

    return {"torch SDPA": run}


def interleave(runs, rounds: int):
    """Seconds of every contender, round by round; one round before them warms up."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def measure(case: Case, rounds: int) -> list[dict]:
    runs, memory = jax_contenders(case)
    seconds = interleave(runs | torch_contender(case), case.rounds or rounds)
    ratio = lambda times: statistics.median(t / ours for t, ours in zip(times, seconds["chunked"], strict=True))
    return [
        {"contender": name, "ms": statistics.median(times) * 1e3, "ratio": ratio(times), "temp_mib": memory.get(name)}
        for name, times in seconds.items()
    ]


def table(results: dict[str, list[dict]]) -> Table:
    shown = Table("case", "contender", "median ms", "time / chunked", "temporaries MiB")
    for name, rows in results.items():
        for row in rows:
            temp = "" if row["temp_mib"] is None else f"{row['temp_mib']:.1f}"
            shown.add_row(name, row["contender"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}", temp)
        shown.add_section()
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which cases (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the short cases")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    results = {name: measure(CASES[name], args.rounds) for name in args.cases}
    Console().print(table(results))
    for name in args.cases:
        print(f"{name}: {CASES[name].about}; {CASES[name]}")
    if args.json:
        meta = {"jax": jax.__version__, "machine": platform.platform(), "cpu": platform.processor()}
        cases = {name: dataclasses.asdict(CASES[name]) for name in args.cases}
        args.json.write_text(json.dumps({**meta, "cases": cases, "results": results}, indent=1))


if __name__ == "__main__":
    main()
