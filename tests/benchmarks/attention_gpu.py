"""Attention on one NVIDIA GPU: TFLOP/s of maxlib's kernels, cuDNN, XLA, tokamax and torch SDPA, in one run; decoding in
GB/s.

    python -m tests.benchmarks.attention_gpu [--cases causal-128 ...] [--contenders cuDNN ...] [--rounds 10]
        [--minutes 9] [--json out.jsonl]
    python -m tests.benchmarks.attention_gpu --tiny   # the same code at small sizes, also on a CPU

Everything is compiled first, side by side. Every contender's results are first compared with those of `chunked` in
float32; one that is off is not timed. Then they take turns, round by round, each round ten calls and one wait, which
hides the launch of all but the first; the table shows medians. FLOPs are those of the pairs that a mask leaves (4 per
pair, head and channel forward, 10 backward), whoever runs them. Decoding counts the bytes of the keys and values that
are filled, which anybody must read at least. What a contender cannot do, or fails at, is left out with its reason. Each
result is a line of JSON as soon as it is there, and cases that begin after `--minutes` are left out.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from maxlib import ops
from maxlib.ops import attention
from maxlib.ops._attention.tokamax_triton import has_triton_attention

CALLS = 10  # between two waits for the device
TOLERANCE = 1e-2  # of an array's norm; rounding to bfloat16 alone makes 0.002
LONGEST_XLA = 8192  # tokens: beyond, matrices of logits in both passes take more than such a GPU has


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of tokens in bfloat16; causal unless `full`."""

    about: str
    tokens: int = 16384
    batch: int = 1
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
        return tuple(np.broadcast_to(x.astype(np.int32), (self.batch, self.tokens)) for x in (start, end))

    @property
    def plain(self) -> bool:
        """Returns True if the mask is only causal or full, which every implementation supports."""
        return self.window is None and self.softcap is None and not self.sinks and self.documents == 1

    @property
    def mask(self) -> ops.MaskHint:
        """Returns the mask hint that `nn.Attention` passes to kernels which need a named mask."""
        ids = np.arange(self.tokens, dtype=np.int32) // (self.tokens // self.documents)
        ids = jnp.asarray(np.broadcast_to(ids, (self.batch, self.tokens)))
        static = ops.StaticMask("full" if self.full else "causal", self.window, self.documents > 1, aligned=True)
        return ops.MaskHint(static, (ids, ids) if self.documents > 1 else None)

    def tiny(self) -> "Case":
        """Returns the same case at a size for a CPU."""
        few = {"tokens": 256, "batch": min(self.batch, 2), "heads": 2 * self.heads // self.kv_heads, "kv_heads": 2}
        return dataclasses.replace(self, window=self.window and 32, **few)

    def flops(self) -> dict[str, float]:
        start, end = self.bounds()
        pairs = float(np.sum(end - start, dtype=np.float64)) * self.heads  # of all rows
        Hk, Hv = self.key_dim, self.value_dim
        return {"forward": 2 * pairs * (Hk + Hv), "backward": 2 * pairs * (3 * Hk + 2 * Hv)}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of q, k, v and the output's cotangent."""
        B, T, N, K = self.batch, self.tokens, self.heads, self.kv_heads
        return (B, T, N, self.key_dim), (B, T, K, self.key_dim), (B, T, K, self.value_dim), (B, T, N, self.value_dim)


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
# The bar of these: the default reaches 0.95 of the best of cuDNN and tokamax.
CASES |= {
    f"{length}k-{width}": Case(
        "32k tokens in all, 2,048 channels",
        tokens=1024 * length,
        batch=32 // length,
        heads=2048 // width,
        kv_heads=2048 // width,
        key_dim=width,
        value_dim=width,
    )
    for length in (2, 8, 32)
    for width in (64, 128, 256)
} | {
    "gqa-2": Case("two query heads for a key head", tokens=8192, heads=32),
    "gqa-8": Case("eight query heads for a key head", tokens=8192, heads=32, kv_heads=4),
    "packed-64": Case(
        "eight documents of 1k", tokens=8192, documents=8, heads=32, kv_heads=32, key_dim=64, value_dim=64
    ),
    "packed-gqa": Case("eight documents of 1k, grouped heads", tokens=8192, documents=8, heads=32, kv_heads=8),
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
    latents: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of q, k and v; latents are keys and values."""
        B, S, K = self.rows, self.capacity, self.kv_heads
        values = () if self.latents else ((B, S, K, self.value_dim),)
        return (B, 1, self.heads, self.key_dim), (B, S, K, self.key_dim), *values

    def tiny(self) -> "Decoding":
        """Returns the same case at a size for a CPU."""
        return dataclasses.replace(self, rows=2, capacity=512, filled=512 * self.filled // self.capacity)

    def bytes(self) -> int:
        return 2 * self.rows * self.filled * self.kv_heads * (self.key_dim + (0 if self.latents else self.value_dim))

    def contenders(self) -> dict:
        """Functions of q, k and v; of q and latents."""
        length = jnp.full(self.rows, self.filled, jnp.int32)
        width = (self.value_dim,) if self.latents else ()
        ours = lambda name: lambda *qkv: attention(*qkv, *width, k_end=length[:, None], implementation=name)
        options = {"key_value_seq_lengths": length, "query_seq_lengths": jnp.ones_like(length)}
        theirs = lambda name: lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options, implementation=name)
        hint = ops.MaskHint(ops.StaticMask("causal"))
        programs = {
            "maxlib default": lambda *qkv: attention(*qkv, *width, k_end=length[:, None], mask_hint=hint),
            "maxlib split_kv": ours("split_kv"),
            "maxlib chunked": ours("chunked"),
        }
        if self.latents:
            return programs | {"maxlib mosaic_gpu_mla": ours("mosaic_gpu_mla")}
        return programs | {"maxlib mosaic_gpu": ours("mosaic_gpu"), "cuDNN": theirs("cudnn"), "XLA": theirs("xla")}


DECODING = {
    "decode": Decoding("the bar: 80% of the memory's bandwidth, 4.8 TB/s on an H200"),
    "decode-half": Decoding("a cache half filled: half the time of decode", filled=16384),
    "decode-one-row": Decoding("one row, which leaves the most idle", rows=1),
}
LATENTS = {"kv_heads": 1, "key_dim": 576, "value_dim": 512, "latents": True}
DECODING |= {
    "latents-16": Decoding("the latents of DeepSeek-V2-Lite", heads=16, **LATENTS),
    "latents-128": Decoding("the latents of DeepSeek-V3", heads=128, **LATENTS),
    "latents-64-rows": Decoding("the latents of DeepSeek-V3, 64 rows of 4k", 64, 4096, 4096, 128, **LATENTS),
}


def structs(case: Case | Decoding, dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a case's arrays."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes]


def arrays(case: Case | Decoding, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """Returns random arrays of a case: the same numbers in every dtype."""
    keys = jax.random.split(jax.random.key(0), len(case.shapes))
    draw = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
    return [draw(key, shape) for key, shape in zip(keys, case.shapes, strict=True)]


def measure_decoding(case: Decoding, made: Mapping[str, Any], rounds: int) -> Iterator[dict]:
    """Compares and times programs that `decoding_programs` compiled."""
    if isinstance(made["truth"], str):
        raise RuntimeError(f"nothing to compare with: {made['truth']}")
    inputs, truth = arrays(case), made["truth"](*arrays(case, jnp.float32))
    runs = {
        name: run if isinstance(run, str) else verified(functools.partial(run, *inputs), [truth])
        for name, run in made.items()
        if name != "truth"
    }
    for name, times in take_turns(runs, rounds).items():
        row = {"phase": "decode", "contender": name}
        yield row | ({"left_out": times} if isinstance(times, str) else speeds(times, gbs=case.bytes() / 1e9))


def decoding_programs(case: Decoding) -> dict[str, Callable]:
    """Returns functions that compile the contenders, and what they are compared with."""
    calls = case.contenders()
    makes = {name: lambda call=call: jax.jit(call).lower(*structs(case)).compile() for name, call in calls.items()}
    exact = for_truth(calls["maxlib chunked"])
    return makes | {"truth": lambda: exact.lower(*structs(case, jnp.float32)).compile()}


def speeds(seconds: float, **amounts: float) -> dict:
    """Milliseconds, and each amount by the second."""
    return {"ms": seconds * 1e3} | {name: amount / seconds for name, amount in amounts.items()}


def verified(run: Callable, truth: Sequence[jax.Array]) -> Callable | str:
    """Returns `run` if its results are right, else by how much they are not."""
    errors = attempt(
        lambda: [float(off_by(got, want)) for got, want in zip(jax.tree.leaves(run()), truth, strict=True)]
    )
    if isinstance(errors, str):
        return errors
    for number, error in enumerate(errors):
        if not error <= TOLERANCE:
            return f"wrong: result {number} is off by {error:.2g} of its norm"
    return run


@jax.jit
def off_by(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the norm of the difference relative to that of `want`."""
    return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.maximum(jnp.linalg.norm(want), 1e-6)


def take_turns(runs: dict[str, Callable | str], rounds: int) -> dict[str, float | str]:
    """Returns median seconds of a call of every contender, or the reason why there are none."""
    seconds: dict[str, list[float] | str] = {name: run if isinstance(run, str) else [] for name, run in runs.items()}
    for number in range(rounds + 1):  # the first round warms up
        for name, times in seconds.items():
            if isinstance(times, str):
                continue
            taken = attempt(functools.partial(timed, runs[name]))
            if isinstance(taken, str):
                seconds[name] = taken
            elif number:
                times.append(taken)
    return {name: times if isinstance(times, str) else statistics.median(times) for name, times in seconds.items()}


def timed(run: Callable) -> float:
    """Returns the seconds of one of several calls that are waited for together."""
    begin = time.perf_counter()
    wait = getattr(run, "wait", jax.block_until_ready)  # torch waits for its own stream
    wait([run() for _ in range(CALLS)])
    return (time.perf_counter() - begin) / CALLS


def contenders(case: Case) -> dict:
    """Functions of q, k, v, or the reason why there is none."""
    start, end = map(jnp.asarray, case.bounds())
    sinks = jnp.zeros(case.heads) if case.sinks else None
    window = None if case.window is None else (case.window - 1, 0)

    def ours(name):
        options = {"k_start": start, "k_end": end, "softcap": case.softcap, "sinks": sinks, "mask_hint": case.mask}
        return lambda q, k, v: attention(q, k, v, **options, implementation=name)

    def theirs(name):
        if case.softcap is not None or case.sinks or case.documents > 1:
            return "no soft-cap, sinks or documents"
        if case.key_dim != case.value_dim:
            return "wants values as wide as keys"
        if name == "xla" and case.tokens > LONGEST_XLA:
            return f"at {case.tokens} tokens its logits may not fit"
        options = {"is_causal": not case.full, "local_window_size": window, "implementation": name}
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)

    named = {
        f"maxlib {name or 'default'}": ours(name)
        for name in (None, "mosaic_gpu", "tokamax", "tokamax_triton", "chunked")
    }
    return named | {"cuDNN": theirs("cudnn"), "XLA": theirs("xla")}


def programs(case: Case) -> dict[str, Callable | str]:
    """Returns functions that compile the contenders in jax, and what they are compared with."""
    makes = {
        name: call if isinstance(call, str) else functools.partial(jax_programs, case, call)
        for name, call in contenders(case).items()
    }
    return makes | {"truth": functools.partial(truth_programs, case)}


def jax_programs(case: Case, call: Callable, dtype: Any = jnp.bfloat16, jit: Callable = jax.jit) -> dict[str, Callable]:
    """Compiles the passes of a contender, and the one that keeps what the backward pass needs."""
    *qkv, d_out = structs(case, dtype)
    trees = []

    def keep(q, k, v):
        leaves, tree = jax.tree.flatten(jax.vjp(call, q, k, v)[1])
        trees.append(tree)
        return leaves

    kept = jit(keep).lower(*qkv)
    backward = jit(lambda leaves, d_out: jax.tree.unflatten(trees[-1], leaves)(d_out))
    return {
        "forward": jit(call).lower(*qkv).compile(),
        "kept": kept.compile(),
        "backward": backward.lower(kept.out_info, d_out).compile(),
    }


def truth_programs(case: Case) -> dict[str, Callable]:
    """The same of `chunked` in float32, which needs no matrix of logits."""
    with jax.default_matmul_precision("float32"):
        return jax_programs(case, contenders(case)["maxlib chunked"], jnp.float32, for_truth)


def runs_of(made: dict[str, Callable], inputs: Sequence[jax.Array]) -> dict[str, Callable]:
    """Returns functions without arguments that run compiled passes."""
    *qkv, d_out = inputs
    kept = made["kept"](*qkv)
    return {"forward": lambda: made["forward"](*qkv), "backward": lambda: made["backward"](kept, d_out)}


def for_truth(fn: Callable) -> Callable:
    """Compiles a function that runs once: without a search for the fastest matmuls, which takes seconds for each."""
    on_gpu = jax.default_backend() == "gpu"
    return jax.jit(fn, compiler_options={"xla_gpu_autotune_level": 0} if on_gpu else None)


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
        for x in arrays(case)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = {"is_causal": not case.full, "enable_gqa": case.heads != case.kv_heads}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    def forward():
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    backward = lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
    for run in (forward, backward):
        run.wait = lambda results: torch.cuda.synchronize()
    return {"forward": forward, "backward": backward}


def attempt(make: Callable) -> Any:
    """Returns the result of `make`, or its error: one contender's failure must not end the run."""
    try:
        return make()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:100]}"


def side_by_side(makes: Mapping[Any, Callable | str]) -> dict[Any, Any]:
    """Returns the results of functions that compile, each in a thread of its own, or their errors."""
    with ThreadPoolExecutor() as threads:
        waiting = {
            name: make if isinstance(make, str) else threads.submit(attempt, make) for name, make in makes.items()
        }
        return {name: job if isinstance(job, str) else job.result() for name, job in waiting.items()}


def compiled(makes: Mapping[Any, Mapping[str, Any]], names: Sequence[str] | None) -> dict[Any, dict[str, Any]]:
    """Compiles contenders of all cases side by side: those in `names`, and what they are compared with."""
    if has_triton_attention():
        importlib.import_module("tokamax")  # before threads do, which would wait for each other's imports
    wanted = {
        (case, name): make
        for case, makers in makes.items()
        for name, make in makers.items()
        if names is None or name in (*names, "truth")
    }
    made = side_by_side(wanted)
    return {case: {name: program for (of, name), program in made.items() if of == case} for case in makes}


def measure(case: Case, made: Mapping[str, Any], names: Sequence[str] | None, rounds: int) -> Iterator[dict]:
    """Compares and times programs that `programs` compiled, and torch."""
    inputs = arrays(case)
    exact = runs_of(made["truth"], arrays(case, jnp.float32))
    runs = {
        name: program if isinstance(program, str) else attempt(functools.partial(runs_of, program, inputs))
        for name, program in made.items()
        if name != "truth"
    }
    torch_found = attempt(lambda: torch_runs(case)) if names is None or "torch SDPA" in names else "not asked for"
    for phase, flops in case.flops().items():
        truth = jax.tree.leaves(exact[phase]())
        here = {
            name: result if isinstance(result, str) else verified(result[phase], truth) for name, result in runs.items()
        }
        # torch's arrays lie heads first and on its own device: its kernels are timed as they are.
        here["torch SDPA"] = torch_found if isinstance(torch_found, str) else torch_found[phase]
        for name, result in take_turns(here, rounds).items():
            row = {"phase": phase, "contender": name}
            yield row | ({"left_out": result} if isinstance(result, str) else speeds(result, tflops=flops / 1e12))


def table(rows: Sequence[dict]) -> Table:
    """Prints the timings."""
    columns = [name for name in ("op", "case", "rows", "phase", "contender") if any(name in row for row in rows)]
    shown = Table(*columns, "median ms", "TFLOP/s", "GB/s")
    for row in rows:
        if "ms" in row:
            speed = (f"{row[name]:.3g}" if name in row else "" for name in ("tflops", "gbs"))
            shown.add_row(*(str(row.get(name, "")) for name in columns), f"{row['ms']:.3f}", *speed)
    return shown


class Lines:
    """Prints each row as a line of JSON at once, and keeps it in a file."""

    def __init__(self, path: Path | None, **about: Any):
        self.rows, self.path = [], path
        self.add({"jax": jax.__version__, "device": jax.devices()[0].device_kind} | about)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments shared by all kernel benchmarks."""
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many minutes")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--tiny", action="store_true", help="small sizes and two rounds, also on a CPU")


def nothing_here(args: argparse.Namespace) -> bool:
    """Returns True, and says so, if there is no GPU to measure on."""
    device = jax.devices()[0]
    if args.tiny or device.platform == "gpu":
        return False
    print(f"Nothing measured: this needs an NVIDIA GPU, jax found {device.platform} ({device.device_kind}).")
    return True


def measure_all(cases: Mapping[str, tuple[dict, Callable]], args: argparse.Namespace) -> None:
    """Measures cases, each a function of `rounds` that yields rows, and prints them."""
    begin, rounds = time.monotonic(), 2 if args.tiny else args.rounds
    lines = Lines(args.json, tiny=args.tiny)
    for about, run in cases.values():
        if time.monotonic() - begin > 60 * args.minutes:
            lines.add(about | {"left_out": f"{args.minutes:g} minutes are over"})
            continue
        failed = attempt(lambda about=about, run=run: [lines.add(about | row) for row in run(rounds)])
        if isinstance(failed, str):
            lines.add(about | {"left_out": failed})
        jax.clear_caches()
    Console().print(table(lines.rows))


ALL = CASES | DECODING


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=ALL, default=list(ALL), help="which cases (default: all)")
    parser.add_argument("--contenders", nargs="+", help="which contenders (default: all)")
    add_arguments(parser)
    args = parser.parse_args()
    cases = {name: ALL[name].tiny() if args.tiny else ALL[name] for name in args.cases}
    if nothing_here(args):
        return
    decodes = {name: isinstance(case, Decoding) for name, case in cases.items()}
    makes = {name: decoding_programs(case) if decodes[name] else programs(case) for name, case in cases.items()}
    made = compiled(makes, args.contenders)
    run = lambda name, case: (
        functools.partial(measure_decoding, case, made[name])
        if decodes[name]
        else functools.partial(measure, case, made[name], args.contenders)
    )
    measure_all({name: ({"case": name, "about": case.about}, run(name, case)) for name, case in cases.items()}, args)


if __name__ == "__main__":
    main()
