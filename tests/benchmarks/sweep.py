"""Training steps of every preset, compiled for TPUs without hardware: FLOPs, memory and speed at the roofline.

    python -m tests.benchmarks.sweep [NAME ...] [--targets v5p v6e] [--share 0/4] [--estimate] [--save] [--check]
    python -m tests.benchmarks.sweep --recorded [NAME ...] [--targets v5p v6e] [--check]

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU. Sequences of 4096 tokens (fewer if the model takes fewer), on the
smallest slice on which full remat and one sequence a chip take at most nine tenths of the memory by the analytic model
and, when compiled, fit without computing values again for that: FSDP or, for experts, the fastest of FSDP and the
degrees of expert parallelism by the estimate. Where no slice is large enough, tensor parallelism is tried, then all of
the memory, and then FSDP or experts over several slices. A row is the fastest of the steps that `plan.search` compiles
there, the most promising of `REMATS` and `BATCHES`; if it falls short of 60%, the next slice or layout is tried too.
Presets of the same sizes are compiled once. --share i/n takes every n-th preset from the i-th. --estimate compiles
nothing. --save puts what was compiled into `sweep.json`, and --recorded shows what is there, without libtpu. A row
under 60% MFU has its limit, by the fewest bytes that a program moves (`tests.benchmarks.limits`). --check ends with an
error if a step computes more than 1.45 times the model's FLOPs and is not in `COSTLY`, does not fit, or has less than
60% MFU at the roofline and less than three quarters of its limit, and is not in `SLOW`; with --recorded also if a
preset has no row, and `MISSING` gives no reason.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxlib import nn, plan, sharding, weights
from maxlib.plan._search import _default_layouts as default_layouts
from tests.benchmarks.limits import limit
from tests.benchmarks.plans import AGAIN, GIB

WITH_ENCODERS = ("bert", "modernbert", "t5", "t5gemma", "whisper")
SEQUENCE, LEAST_MFU, NEAR_LIMIT, FULL_SLICE = 4096, 0.6, 0.75, 0.9  # the last of a chip's memory
# What is tried on a slice: remat policies, and multiples of 4096 tokens a chip; and how many of both are compiled.
REMATS, BATCHES, COMPILED = ("full", "attention", "minimal", None), (1, 2, 4), 2
STATE = 16  # bytes a parameter: itself, its gradient and two moments
SIZES = {"v5p": [8 * 2**i for i in range(9)], "v6e": [4 * 2**i for i in range(7)], "v5e": [4 * 2**i for i in range(7)]}
SEVERAL = {
    "v6e": ["256x2", "256x4"]
}  # slices, for what one does not hold; experts, or all parameters, are split over them
CHIPS = ["v5p", "v6e"]  # those that are saved
RECORDED = Path(__file__).with_suffix(".json")
# Presets under 60% and under three quarters of their limit, by what their programs move beyond the count, on some chip.
SLOW = {
    # In that of Qwen3-30B-A3B for v6e, 2.9 times the count: grouped matmuls are 21% of 427 GB, as tiles read rows and
    # matrices again, attention 15%, as blocks read keys and values again, what XLA does to rows between their kernels
    # 23% (gathers, sums, activations), the exchange 3%, the optimizer 8%.
    "rows of experts": (
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v3.2",
        "gemma4-26b-a4b",
        "glm-4.5",
        "glm-4.6",
        "glm-4.7-flash",
        "gpt-oss-120b",
        "gpt-oss-20b",
        "lfm2-8b-a1b",
        "lfm2.5-8b-a1b",
        "mimo-v2-flash",
        "minimax-m2",
        "qwen3-30b-a3b",
        "qwen3-30b-a3b-2507",
        "qwen3-omni-30b-a3b",
        "qwen3-vl-30b-a3b",
    ),
    # In that of Granite 4.0 H 1B for four v6e, 2.1 times the count: elementwise passes and products of chunks are 29%
    # of 112 GB, matmuls 27%, arrays that XLA prefetches 27%, the optimizer 10%.
    "chunks of recurrences": ("falcon-h1-0.5b", "granite-4.0-h-350m"),
    "rows of experts, and chunks of recurrences": (
        "granite-4.0-h-small",
        "granite-4.0-h-tiny",
        "kimi-linear-48b-a3b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b",
        "qwen3-next-80b-a3b",
        "qwen3.5-122b-a10b",
        "qwen3.5-35b-a3b",
        "qwen3.5-397b-a17b",
    ),
    "rows of experts, and four residual streams": ("deepseek-v4-flash", "glm-5.3-flash"),
    "a toy, narrower than a tile": ("gpt3-52k",),
}
# Presets without a row, and why: the least GiB by the analytic model on 256 v6e, the largest slice, of 31.25 a chip.
MISSING = {
    (
        "llama3.1-405b",
        "v6e",
    ): "45 with tensor parallelism over 4; one sequence keeps 16 and the loss takes up to 21 on any slice",
}
# Rows that fall short without a known reason. --check fails on them.
OPEN: set[tuple[str, str]] = set()
# Why one computes more than 1.45 times the model's FLOPs.
COSTLY = {
    "deepseek-v4-flash": "blocks of 256 keys for a window of 128, entries that a mask hides",
    "gpt3-52k": "a toy, narrower than a tile",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--targets", nargs="+", default=CHIPS, choices=SIZES)
    parser.add_argument("--share", default="0/1", metavar="I/N")
    for option in ("--estimate", "--save", "--recorded", "--check"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if not args.recorded and importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
        return
    first, of = map(int, args.share.split("/"))
    print(
        "| preset, target | parameters | mesh | remat | batch a chip | peak GiB | analytic | FLOPs, times the model's | MFU "
        "| limit | bound by | s |"
    )
    print("|---" * 12 + "|")
    rows = []
    for row in matching(args.names, args.targets) if args.recorded else swept(args, first, of):
        rows.append(row)
        print(shown(row), flush=True)
        if args.save and "error" not in row:
            save(row)
    wrong = [f"{row['preset']} on {row['target']}: {why}" for row in rows for why in faults(row)]
    wrong += [f"{name} on {chip}: no row, and no reason" for name, chip in unrecorded()] if args.recorded else []
    if wrong:
        print(*wrong, sep="\n")
        sys.exit(1 if args.check else 0)


def swept(args: argparse.Namespace, first: int, of: int) -> Iterator[dict[str, Any]]:
    for name in (args.names or distinct())[first::of]:
        for chip in args.targets:
            yield row(name, chip, 0 if args.estimate else COMPILED)


def recorded() -> list[dict[str, Any]]:
    """Returns the rows that were saved."""
    return json.loads(RECORDED.read_text())


def matching(names: list[str], chips: list[str]) -> list[dict[str, Any]]:
    """Returns the saved rows of some presets (all if none is named) on some kinds of chip."""
    chosen = [row for row in recorded() if row["target"].split("-")[0] in chips]
    return [row for row in chosen if not names or row["preset"] in names]


def unrecorded() -> list[tuple[str, str]]:
    """Returns the presets, each with a kind of chip, that have neither a saved row nor a reason for having none."""
    have = {(row["preset"], row["target"].split("-")[0]) for row in recorded()} | {*MISSING}
    return [pair for pair in itertools.product(distinct(), CHIPS) if pair not in have]


def save(one: dict[str, Any]) -> None:
    """Puts a row into the file, in place of that of the same preset on the same kind of chip."""
    key = lambda row: (row["preset"], row["target"].split("-")[0])
    rows = {key(row): row for row in recorded()} | {key(one): one}
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    RECORDED.write_text(f"[\n{lines}\n]\n")


def distinct() -> list[str]:
    """Returns one preset of each group of decoders with the same configuration."""
    names: dict[Any, str] = {}
    for family in weights.families():
        if issubclass(family.model, nn.Decoder) and family.name not in WITH_ENCODERS:
            for name, cfg in family.presets.items():
                names.setdefault(cfg, name)
    return list(names.values())


def row(name: str, chip: str, compile: int = COMPILED) -> dict[str, Any]:
    """Returns the compiler's and the roofline's results for a preset on the smallest slice that fits, or an error."""
    try:
        got = planned(name, chip, compile)
    except Exception as error:  # one that cannot be planned must not end the sweep
        return {"preset": name, "target": chip, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    return as_row(name, got)


def as_row(name: str, got: plan.Plan) -> dict[str, Any]:
    """Returns what is recorded of a preset's plan."""
    assert got.flops_factor and got.estimate, "the program's text could not be read"
    row = {
        "preset": name,
        "target": got.job.target,
        "parameters": got.num_parameters,
        "mesh": " x ".join(f"{axis} {n}" for axis, n in got.mesh.items() if n > 1),
        "sequence": got.job.sequence,
        "remat": got.job.remat,
        "batch": got.job.per_device_batch_size,
        "peak": got.peak,
        "analytic": got.analytic.total,
        "fits": got.fits,
        "factor": round(got.flops_factor, 3),
        "mfu": round(got.estimate.mfu, 3),
        "mfu_serial": round(got.estimate.mfu_serial, 3),
        "bound": got.estimate.bound,
        "compile_seconds": round(got.compile_seconds, 1),
        "libtpu": importlib.metadata.version("libtpu"),
    }
    return row | limit_of(row) if row["mfu"] < LEAST_MFU else row


def limit_of(row: dict[str, Any]) -> dict[str, float]:
    """Returns the MFU that the fewest bytes of a row's step allow, which may exceed 1."""
    mesh = {axis: int(n) for axis, n in (part.split() for part in row["mesh"].split(" x "))}
    chip = plan.parse_target(row["target"]).chip
    return {"limit": round(limit(row["preset"], chip, mesh, row["sequence"], row["batch"]).mfu, 3)}


def planned(name: str, chip: str, compile: int) -> plan.Plan:
    """Returns the fastest plan on the smallest slice on which one fits without computing too much again.

    If it falls short of `LEAST_MFU`, also the next layout or larger slice is tried. If no plan fits, returns that on
    the smallest slice; raises ValueError with the last reason if there is no plan at all.
    """
    tried: list[plan.Plan] = []
    slices = 0  # since the first on which a plan fits
    try:
        for job in fitting(name, chip):
            tried += searched(job, compile)
            best = max(map(mfu, filter(is_good, tried)), default=None)
            slices += best is not None
            if slices == 2 or (best or 0.0) >= LEAST_MFU:
                break
    except ValueError:
        if not tried:
            raise
    return max(filter(is_good, tried), key=mfu, default=tried[0])


def mfu(got: plan.Plan) -> float:
    return got.estimate.mfu if got.estimate else 0.0


def searched(job: plan.Job, compile: int) -> list[plan.Plan]:
    """Returns the job's own plan, and those of the most promising remat policies and batches on its slice."""
    batches = [times * SEQUENCE // job.sequence for times in BATCHES]
    result = plan.search(job, layouts=[job.layout], remats=REMATS, batches=batches, compile=compile)
    if not compile:
        return [plan.estimated(job), *result.plans]
    return [plan.plan(job), *(got for got in result.plans if got.compiled)]


def is_good(got: plan.Plan) -> bool:
    """Returns True if a step fits and does not compute too much again."""
    return got.fits and ((got.flops_factor or 0.0) <= 1 + AGAIN or got.job.title in COSTLY)


def fitting(name: str, chip: str) -> Iterator[plan.Job]:
    """Yields the preset's jobs on the slices of a kind of chip on which the analytic model fits, the smallest first.

    Raises ValueError with the last reason in the end.
    """
    sequence = min(SEQUENCE, abstract(name).max_length or SEQUENCE)
    why = "no slice is large enough"
    for size, tensor, share in slices(chip):
        try:
            if best := fastest(plan.Job(name, f"{chip}-{size}", sequence=sequence, remat="full"), tensor, share):
                yield best
        except ValueError as error:
            why = str(error)
    raise ValueError(why)


def slices(chip: str) -> Iterator[tuple[Any, bool, float]]:
    """Yields sizes, whether tensor parallelism is tried there, and the share of the memory that a plan may take.

    First all slices without, then with, then all of the memory without, also of several slices.
    """
    for tensor, share in ((False, FULL_SLICE), (True, FULL_SLICE), (False, 1.0)):
        yield from ((size, tensor, share) for size in SIZES[chip])
    yield from ((several, False, 1.0) for several in SEVERAL.get(chip, ()))


def fastest(job: plan.Job, tensor: bool, share: float) -> plan.Job | None:
    """Returns the job in the fastest of its layouts that take this share of the memory at most, None if none does."""
    target = plan.parse_target(job.target)
    most = share * target.chip.memory
    if STATE * parameters(job.title) > most * target.devices:
        return None
    jobs = [job] if target.slices == 1 else [across(job, target.slices, axis) for axis in ("fsdp", "data")]
    known = [layout for job in jobs for layout in default_layouts(job)]
    layouts = [layout for layout in known if (dict(layout.mesh.degrees).get("tensor", 1) > 1) == tensor]
    result = plan.search(job, layouts=layouts, remats=["full"], batches=[1], compile=0)
    return next((got.job for got in result.plans if got.peak < most), None)


def across(job: plan.Job, slices: int, axis: str) -> plan.Job:
    """Returns the job with a mesh axis over slices: parameters are split over them, or only experts (`data`)."""
    return dataclasses.replace(job, layout=sharding.Layout({"fsdp": -1, "dcn": {axis: slices}}, sharding.FSDP))


@functools.cache
def parameters(name: str) -> int:
    return nn.num_parameters(abstract(name))


@functools.cache
def abstract(name: str) -> nn.Decoder:
    """Returns the preset's model, with shapes instead of arrays."""
    cfg = weights.presets()[name]
    family = next(candidate for candidate in weights.families() if name in candidate.presets)
    return jax.eval_shape(lambda: family.model(cfg, rngs=nnx.Rngs(0)))


def shown(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['preset']}, {row['target']} | {row['error']} |"
    values = [
        f"{row['parameters'] / 1e9:.2f}B",
        row["mesh"],
        str(row["remat"]),
        f"{row['batch']:g}",
        f"{row['peak'] / GIB:.2f}",
        f"{row['analytic'] / row['peak'] - 1:+.1%}",
        f"{row['factor']:.2f}",
        f"{row['mfu']:.1%}",
        f"{row['limit']:.0%}" if "limit" in row else "",
    ]
    return (
        f"| {row['preset']}, {row['target']} | {' | '.join(values)} | {row['bound']} | {row['compile_seconds']:.0f} |"
    )


def faults(row: dict[str, Any]) -> list[str]:
    """Returns the bounds that a row misses without a known reason."""
    if "error" in row:
        return [row["error"]]
    wrong = [] if row["fits"] else [f"needs {row['peak'] / GIB:.2f} GiB"]
    if row["factor"] > 1 + AGAIN and row["preset"] not in COSTLY:
        wrong.append(f"{row['factor']:.2f} times the model's FLOPs")
    if row["mfu"] < min(LEAST_MFU, NEAR_LIMIT * row.get("limit", 1.0)) and not any(
        row["preset"] in names for names in SLOW.values()
    ):
        wrong.append(f"{row['mfu']:.1%} MFU at the roofline, limit {row.get('limit', 1.0):.0%}")
    return wrong


if __name__ == "__main__":
    main()
