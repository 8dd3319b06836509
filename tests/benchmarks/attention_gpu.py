"""Attention on one NVIDIA GPU: TFLOP/s of maxlib's kernels, cuDNN, XLA, tokamax and torch SDPA, in one run; decoding in
GB/s.

    python -m tests.benchmarks.attention_gpu [--cases causal-128 ...] [--rounds 20] [--json out.json]

Contenders take turns, round by round; the table shows medians. FLOPs are those of the pairs that a mask leaves (4 per
pair, head and channel forward, 10 backward), whoever runs them. Decoding counts the bytes of the keys and values that
are filled, which anybody must read at least. What a contender cannot do is left out with its reason.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from maxlib.ops._attention import attention


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of tokens in bfloat16; causal unless `full`."""

    about: str
    tokens: int = 16384
    heads: int = 16
    kv_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    full: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: int = 1

    def bounds(self):
        index = np.arange(self.tokens, dtype=np.int32)
        length = self.tokens // self.documents
        start, end = index // length * length, index + 1
        if self.full:
            end = start + length
        if self.window is not None:
            start = np.maximum(start, index - self.window + 1)
        return start.astype(np.int32)[None], end.astype(np.int32)[None]

    @property
    def plain(self) -> bool:
        """Whether causal or full is all there is to it, which everybody can."""
        return self.window is None and self.softcap is None and not self.sinks and self.documents == 1

    def flops(self) -> dict[str, float]:
        start, end = self.bounds()
        pairs = float(np.sum(end - start, dtype=np.float64)) * self.heads
        Hk, Hv = self.key_dim, self.value_dim
        return {"forward": 2 * pairs * (Hk + Hv), "backward": 2 * pairs * (3 * Hk + 2 * Hv)}

    def arrays(self):
        keys = jax.random.split(jax.random.key(0), 4)
        T, N, K = self.tokens, self.heads, self.kv_heads
        shapes = (1, T, N, self.key_dim), (1, T, K, self.key_dim), (1, T, K, self.value_dim), (1, T, N, self.value_dim)
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


CASES = {
    "causal-128": Case("the bar: 600 TFLOP/s forward, 500 backward, no less than cuDNN"),
    "full-128": Case("without a mask", full=True),
    "causal-64": Case("the bar: 1.1x cuDNN", heads=32, kv_heads=32, key_dim=64, value_dim=64),
    "causal-256": Case("wide heads", heads=8, kv_heads=8, key_dim=256, value_dim=256),
    "mla": Case("latent attention", key_dim=192, value_dim=128),
    "gqa": Case("grouped heads", heads=32, kv_heads=8),
    "softcap": Case("the bar: under 10% more time than causal-128", softcap=50.0),
    "sinks": Case("the bar: under 10% more time than causal-128", sinks=True),
    "packed": Case("eight documents of 2k", documents=8),
    "causal-32k": Case("what the window is measured against", tokens=32768),
    "window": Case("the bar: within 1.3x of its share of causal-32k's time", tokens=32768, window=1024),
}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """One new token per row, in bfloat16, against a cache of `capacity` tokens of which the first `filled` are
    there.
    """

    about: str
    rows: int = 8
    capacity: int = 32768
    filled: int = 32768
    heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128

    def arrays(self):
        keys = jax.random.split(jax.random.key(0), 3)
        B, S, K = self.rows, self.capacity, self.kv_heads
        shapes = (B, 1, self.heads, self.key_dim), (B, S, K, self.key_dim), (B, S, K, self.value_dim)
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

    def bytes(self) -> int:
        return 2 * self.rows * self.filled * self.kv_heads * (self.key_dim + self.value_dim)

    def contenders(self) -> dict:
        """Functions of q, k, v."""
        length = jnp.full(self.rows, self.filled, jnp.int32)
        ours = lambda name: lambda q, k, v: attention(q, k, v, k_end=length[:, None], implementation=name)
        options = {"key_value_seq_lengths": length, "query_seq_lengths": jnp.ones_like(length)}
        theirs = lambda name: lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options, implementation=name)
        return {
            "maxlib split_kv": ours("split_kv"),
            "maxlib chunked": ours("chunked"),
            "maxlib mosaic_gpu": ours("mosaic_gpu"),
            "cuDNN": theirs("cudnn"),
            "XLA": theirs("xla"),
        }


DECODING = {
    "decode": Decoding("the bar: 80% of the memory's bandwidth, 4.8 TB/s on an H200"),
    "decode-half": Decoding("a cache half filled: half the time of decode", filled=16384),
    "decode-one-row": Decoding("one row, which leaves the most idle", rows=1),
}


def measure_decoding(case: Decoding, rounds: int) -> list[dict]:
    arrays = case.arrays()
    compiled = {
        name: attempt(lambda call=call: jax.jit(call).lower(*arrays).compile())
        for name, call in case.contenders().items()
    }
    runs = {
        name: found if isinstance(found, str) else lambda run=found: jax.block_until_ready(run(*arrays))
        for name, found in compiled.items()
    }
    rows = [
        {"phase": "decode", "contender": name, "ms": median * 1e3, "gbs": case.bytes() / median / 1e9}
        for name, median in take_turns(runs, rounds).items()
    ]
    return rows + [{"contender": name, "left_out": why} for name, why in runs.items() if isinstance(why, str)]


def take_turns(runs: dict, rounds: int) -> dict[str, float]:
    """Median seconds of every contender that runs."""
    seconds = {name: [] for name, run in runs.items() if not isinstance(run, str)}
    for i in range(rounds + 2):  # two rounds warm up
        for name, times in seconds.items():
            begin = time.perf_counter()
            runs[name]()
            if i >= 2:
                times.append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def contenders(case: Case) -> dict:
    """Functions of q, k, v, or the reason why there is none."""
    start, end = map(jnp.asarray, case.bounds())
    sinks = jnp.zeros(case.heads) if case.sinks else None
    window = None if case.window is None else (case.window - 1, 0)

    def ours(q, k, v):
        options = {"k_start": start, "k_end": end, "softcap": case.softcap, "sinks": sinks}
        return attention(q, k, v, **options, implementation="mosaic_gpu")

    def theirs(name):
        if case.softcap is not None or case.sinks or case.documents > 1:
            return "no soft-cap, sinks or documents"
        if case.key_dim != case.value_dim:
            return "wants values as wide as keys"
        if name == "xla" and 2 * case.heads * case.tokens**2 > 2**34:
            return "its logits would take more than 16 GiB"
        options = {"is_causal": not case.full, "local_window_size": window, "implementation": name}
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)

    return {"maxlib": ours, "cuDNN": theirs("cudnn"), "XLA": theirs("xla"), "tokamax": _tokamax(case, window)}


def _tokamax(case: Case, window):
    try:
        import tokamax
    except ModuleNotFoundError:
        return "not installed"
    if case.sinks or case.documents > 1:
        return "no sinks or documents"
    options = {"is_causal": not case.full, "logits_soft_cap": case.softcap, "local_window_size": window}
    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, **options)


def jax_runs(case: Case, call) -> dict:
    """Timed functions of a contender in jax, compiled."""
    q, k, v, d_out = case.arrays()
    forward = jax.jit(call).lower(q, k, v).compile()
    _, vjp = jax.jit(lambda q, k, v: jax.vjp(call, q, k, v))(q, k, v)
    backward = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, d_out).compile()
    return {
        "forward": lambda: jax.block_until_ready(forward(q, k, v)),
        "backward": lambda: jax.block_until_ready(backward(vjp, d_out)),
    }


def torch_runs(case: Case) -> dict | str:
    """The same for torch's SDPA, which chooses its own kernel."""
    try:
        import torch
    except ModuleNotFoundError:
        return "not installed"
    if not torch.cuda.is_available():
        return "installed without CUDA"
    if not case.plain:
        return "causal and full only, else a mask of T x T"
    q, k, v, d_out = (
        torch.tensor(np.asarray(x, np.float32)).transpose(1, 2).to("cuda", torch.bfloat16).contiguous()
        for x in case.arrays()
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = {"is_causal": not case.full, "enable_gqa": case.heads != case.kv_heads}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def forward():
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        torch.cuda.synchronize()

    def backward():
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
        torch.cuda.synchronize()

    return {"forward": forward, "backward": backward}


def attempt(make) -> dict | str:
    """What `make` returns, or why it failed: one contender's failure must not end the run."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def measure(case: Case, rounds: int) -> list[dict]:
    calls = contenders(case)
    runs = {
        name: call if isinstance(call, str) else attempt(lambda c=call: jax_runs(case, c))
        for name, call in calls.items()
    }
    runs["torch SDPA"] = attempt(lambda: torch_runs(case))
    rows = []
    for phase, flops in case.flops().items():
        here = {name: found if isinstance(found, str) else found[phase] for name, found in runs.items()}
        for name, median in take_turns(here, rounds).items():
            rows.append({"phase": phase, "contender": name, "ms": median * 1e3, "tflops": flops / median / 1e12})
    return rows + [{"contender": name, "left_out": why} for name, why in runs.items() if isinstance(why, str)]


def table(results: dict[str, list[dict]]) -> Table:
    shown = Table("case", "phase", "contender", "median ms", "TFLOP/s", "GB/s")
    for name, rows in results.items():
        for row in rows:
            if "left_out" not in row:
                speed = f"{row['tflops']:.0f}" if "tflops" in row else "", f"{row['gbs']:.0f}" if "gbs" in row else ""
                shown.add_row(name, row["phase"], row["contender"], f"{row['ms']:.3f}", *speed)
        shown.add_section()
    return shown


ALL = CASES | DECODING


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=ALL, default=list(ALL), help="which cases (default: all)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.exit(
            0, f"Nothing measured: this needs an NVIDIA GPU, jax found {device.platform} ({device.device_kind}).\n"
        )
    how = {name: measure_decoding if name in DECODING else measure for name in args.cases}
    results = {name: run(ALL[name], args.rounds) for name, run in how.items()}
    Console().print(table(results))
    for name, rows in results.items():
        left_out = "; ".join(f"{row['contender']}: {row['left_out']}" for row in rows if "left_out" in row)
        print(f"{name}: {ALL[name].about}. Left out: {left_out or 'nobody'}")
    if args.json:
        meta = {"jax": jax.__version__, "device": device.device_kind}
        cases = {name: dataclasses.asdict(ALL[name]) for name in args.cases}
        args.json.write_text(json.dumps({**meta, "cases": cases, "results": results}, indent=1))


if __name__ == "__main__":
    main()
