"""Memory and collectives of training steps compiled for TPUs and GPUs without hardware; on TPUs compared with MaxText's
ahead-of-time compilation.

    python -m tests.benchmarks.plans [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --published [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --present [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --remat
    python -m tests.benchmarks.plans --pipelines [NAME ...] [--check]
    python -m tests.benchmarks.plans --search [--check]
    python -m tests.benchmarks.plans --gpu [NAME ...] [--json out.json] [--check]

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU; --gpu needs jax's plugin for CUDA (`pip install "maxlib[cuda]"`), no
GPU. float32 parameters and Adam moments, bfloat16 arithmetic, full remat, scanned layers, one sequence per chip. The
peer's figures: commit e591f30, libtpu 0.0.51, flash kernel, the same settings. --check ends with an error if a step
needs more than the peer's or writes more collectives, computes more than 1.45 times the model's FLOPs, the analytic
model is off by more than a tenth, 70B takes 3 s to lower or, where no NAME is given, 160 layers half as long again as
8. --published: the configurations of MaxText's tables of MFU (`published.py`), each beside what was measured; --check
ends with an error if one does not fit, computes more than that, the analytic model is off by more than a tenth, or the
roofline is lower than what was measured. --present: the networks
that the same scripts build today, beside the peer's memory; --check ends with an error if one needs more, `LARGER` if
it needs more than is written there. --remat: one model under every policy. --pipelines: `PIPELINES`; --check ends with
an error if one does not fit. --search: 30 layouts of an 8B model on 16 chips; --check ends with an error if that takes
ten minutes, or none of them fits. --gpu: steps for H100 and H200; --check ends with an error if one does not fit, the
analytic model is off by more than a tenth, arithmetic is not 1.2 to 1.4 times the model's, or compiling takes two
minutes.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from maxlib import nn, plan, sharding, weights
from maxlib.distributed import xla_flags
from maxlib.plan._program import make_program
from maxlib.plan._targets import has_gpu_compiler
from tests.benchmarks.published import PRESENT, ROWS, Row
from tests.plan.jobs import layout

GIB = 2**30
EXPERTS_BY_NUMBER = {"layout": layout("fsdp_by_expert")}
DEEPSEEK = "deepseek-v3", "v5p-512", 4096


@dataclasses.dataclass(frozen=True)
class Peer:
    """The peer's step: its peak in GiB, None where it does not fit; how many collectives are written in its program,
    and the GiB that they move in a step, read by `maxlib.plan` as its own, None where its program was not read.
    """

    peak: float | None
    written: int | None = None
    moved: float | None = None

    def excess(self, got: plan.Plan) -> list[str]:
        """Returns the quantities of which `got` has more than the peer; nothing if the peer was not read."""
        if self.written is None or self.moved is None:
            return []
        count, size = written(got), moved(got)
        wrong = [f"{count} collectives for {self.written}"] if count > self.written else []
        wrong += [f"{size:.2f} GiB moved for {self.moved}"] if size > 1.0001 * self.moved else []
        return wrong


def without_images(name: str) -> Any:
    """The config of a preset without its image encoder, which the peer's step does not have."""
    return dataclasses.replace(weights.presets()[name], vision=None)


# preset or config, target, sequence, the peer (None: not measured), other settings
CASES: dict[str, tuple[Any, str, int, Peer | None, dict[str, Any]]] = {
    "llama2-7b": ("llama2-7b", "v5p-8", 2048, Peer(29.04, 36, 36.71), {}),
    "llama3.1-8b": ("llama3.1-8b", "v5e-16", 2048, Peer(9.32, 95, 42.89), {}),
    "llama3.1-8b offloaded": ("llama3.1-8b", "v5e-16", 2048, None, {"layout": layout("fsdp+offload_optimizer")}),
    "llama3.1-8b offloaded layers": (
        "llama3.1-8b",
        "v5e-16",
        2048,
        None,
        {"layout": layout("fsdp+offload_optimizer+offload_layers")},
    ),
    "mixtral-8x7b": ("mixtral-8x7b", "v5p-128", 4096, Peer(17.50, 33, 262.56), {}),
    "mixtral-8x22b": ("mixtral-8x22b", "v5p-128", 4096, Peer(46.47, 34, 793.61), {}),
    "llama2-70b": ("llama2-70b", "v5p-128", 4096, Peer(25.87, 34, 383.61), {}),
    "llama3.1-405b": ("llama3.1-405b", "v5p-512", 8192, Peer(71.82, 29, 2252.72), {}),
    "deepseek-v3": (*DEEPSEEK, Peer(77.52, 69, 3763.35), EXPERTS_BY_NUMBER),
    "deepseek-v3 ep8": (*DEEPSEEK, Peer(71.53, 89, 718.36), {"layout": layout("ep", fsdp=32, expert=8)}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", "v5p-32", 4096, Peer(34.90), {}),
    "gpt-oss-20b": ("gpt-oss-20b", "v5p-16", 4096, Peer(50.80), {}),
    "llama4-17b-16e": ("llama4-17b-16e", "v5p-64", 4096, Peer(75.17), {}),
    "qwen3-next-80b-a3b": ("qwen3-next-80b-a3b", "v5p-64", 4096, Peer(63.22), {}),
    "qwen3-next-80b-a3b ep8": (
        "qwen3-next-80b-a3b",
        "v5p-64",
        4096,
        Peer(67.86),
        {"layout": layout("ep", fsdp=4, expert=8)},
    ),
    "qwen3.5-35b-a3b text": (without_images("qwen3.5-35b-a3b"), "v5p-32", 4096, Peer(51.36), {}),
    "gemma4-31b text": (without_images("gemma4-31b"), "v5p-64", 4096, Peer(21.83), {}),
    "gemma4-26b-a4b text": (without_images("gemma4-26b-a4b"), "v5p-32", 4096, Peer(30.31), EXPERTS_BY_NUMBER),
    "deepseek-v3 ep64": (*DEEPSEEK, Peer(None), {"layout": layout("ep", fsdp=4, expert=64)}),
}
# preset, target, sequences per GPU, sequence, other settings; attention by our kernels for Hopper where not said.
GPU_CASES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "llama2-7b": ("llama2-7b", "h100x8", 1, 4096, {}),
    "llama2-7b blockwise": ("llama2-7b", "h100x8", 1, 4096, {"attention": "chunked"}),
    "llama2-7b batch 4": ("llama2-7b", "h100x8", 4, 4096, {}),
    "llama3.1-8b": ("llama3.1-8b", "h100x8", 2, 8192, {}),
    "llama3-70b h200x16": ("llama3-70b", "h200x16", 1, 8192, {}),
    "llama3-70b": ("llama3-70b", "h100x128", 2, 8192, {}),
    "mixtral-8x7b": ("mixtral-8x7b", "h100x16", 1, 4096, {}),
    "mixtral-8x7b ep8": ("mixtral-8x7b", "h100x32", 1, 4096, {"layout": layout("ep", fsdp=4, expert=8)}),
}
DEEPSEEK_LONG, LONG = (*DEEPSEEK, 2), {"stage": 4, "expert": 64}
EIGHT, SEVENTY = ("llama3-8b", "v5p-32", 4096, 4), ("llama2-70b", "v5p-128", 4096, 4)
SMALL, LARGE = {"stage": 4, "fsdp": 4}, {"stage": 4, "fsdp": 16}
# model, target, sequence, sequences per chip; layout and other settings
PIPELINES: dict[str, tuple[tuple[str, str, int, int], dict[str, Any]]] = {
    "8B GPipe": (EIGHT, {"layout": layout("fsdp+pp:16", **SMALL)}),
    "8B GPipe, twice around": (EIGHT, {"layout": layout("fsdp+pp:16x2", **SMALL)}),
    "8B 1F1B": (EIGHT, {"layout": layout("fsdp+pp_1f1b:16", **SMALL)}),
    "8B 1F1B, twice around": (EIGHT, {"layout": layout("fsdp+pp_1f1b:16x2", **SMALL)}),
    "8B GPipe, whole": (EIGHT, {"layout": layout("zero1+pp:16", stage=4, data=4)}),
    "8B 1F1B, whole": (EIGHT, {"layout": layout("zero1+pp_1f1b:16", stage=4, data=4)}),
    "70B GPipe": (SEVENTY, {"layout": layout("fsdp+pp:16", **LARGE)}),
    "70B 1F1B": (SEVENTY, {"layout": layout("fsdp+pp_1f1b:16", **LARGE)}),
    "70B 1F1B, twice around": (SEVENTY, {"layout": layout("fsdp+pp_1f1b:16x2", **LARGE)}),
    "70B 1F1B, two slices": (
        ("llama2-70b", "v5p-128x2", 4096, 2),
        {"layout": layout("fsdp+pp_1f1b:4", fsdp=-1, dcn={"stage": 2})},
    ),
    "Mixtral 1F1B": (
        ("mixtral-8x7b", "v5p-128", 4096, 4),
        {"layout": layout("ep+pp_1f1b:16", stage=4, fsdp=4, expert=4)},
    ),
    "DeepSeek-V3 GPipe, uneven": (DEEPSEEK_LONG, {"layout": layout("ep+pp:8", **LONG)}),
    "DeepSeek-V3 1F1B, uneven": (DEEPSEEK_LONG, {"layout": layout("ep+pp_1f1b:8", **LONG)}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    for option in ("--check", "--published", "--present", "--remat", "--pipelines", "--search", "--gpu"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if args.gpu and not has_gpu_compiler():
        print('skipped: plans for GPUs need jax\'s plugin for CUDA, pip install "maxlib[cuda]"')
    elif args.gpu:
        gpu_table(args.names, args.json, args.check)
    elif importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
    elif args.search:
        search(args.check)
    elif args.remat:
        remat_table()
    elif args.pipelines:
        pipelines(args.names, args.check)
    else:
        table = published_table if args.published else present_table if args.present else compare
        table(args.names, args.json, args.check)


LOWERED = 3.0  # seconds, at most


def compare(names: list[str], out: Path | None, check: bool) -> None:
    rows, wrong = [], []
    print(
        "| model, target | sequence | peak GiB | analytic | peer | collectives | moved GiB | peer | lower s | compile s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in names or CASES:
        preset, target, sequence, peer, more = CASES[name]
        got = plan.plan(plan.Job(preset, target, sequence=sequence, **more))
        kinds = [f"{one.written} {one.kind}" for one in got.costs.collectives] if got.costs else ["not readable"]
        sizes = [f"{got.peak / GIB:.2f}", analytic(got), theirs(peer)]
        sums = [f"{moved(got):.2f}", f"{peer.moved:.2f}" if peer and peer.moved else "", f"{got.lower_seconds:.1f}"]
        row = [*sizes, " / ".join(kinds), *sums, f"{got.compile_seconds:.0f}"]
        print(f"| {name}, {target} | {sequence} | {' | '.join(row)} |", flush=True)
        rows.append(numbers(name, got) | {"peer": peer.peak * GIB if peer and peer.peak else None})
        wrong += [f"{name} ({why})" for why in faults(peer, got)]
    wrong += [] if names else lowering()
    finish(rows, out, wrong if check else [], "worse than the peer, or than it should be")


def faults(peer: Peer | None, got: plan.Plan) -> list[str]:
    """Returns the bounds that a row of the first table misses."""
    most = peer.peak * GIB if peer and peer.peak else got.target.chip.memory
    wrong = [f"peak {got.peak / GIB:.2f} GiB for {most / GIB:.2f}"] if got.peak > most else []
    wrong += [f"analytic model {error(got):+.1%}"] if abs(error(got)) > 0.1 else []
    wrong += [f"{1 + again(got):.2f} times the model's FLOPs"] if again(got) > AGAIN else []
    dense = "70b" in got.job.title  # the model for which the time to lower was promised
    wrong += [f"lowered in {got.lower_seconds:.1f} s"] if dense and got.lower_seconds >= LOWERED else []
    return wrong + (peer.excess(got) if peer else [])


def theirs(peer: Peer | None) -> str:
    return "not measured" if peer is None else f"{peer.peak:.2f}" if peer.peak else "does not fit"


def written(got: plan.Plan) -> int:
    """Collectives in the program's text."""
    assert got.costs, "the program's text could not be read"
    return sum(one.written for one in got.costs.collectives)


def moved(got: plan.Plan) -> float:
    """GiB that the collectives of a step move."""
    assert got.costs, "the program's text could not be read"
    return sum(one.bytes for one in got.costs.collectives) / GIB


def lowering() -> list[str]:
    """Tracing and lowering a model of 70B's width with few layers, and with many: shapes only, nothing is compiled."""
    few, many = (lowered(layers) for layers in (8, 160))
    print(f"lowered: 8 layers in {few:.2f} s, 160 in {many:.2f} s", flush=True)
    return [f"160 layers take {many:.2f} s to lower, 8 take {few:.2f}"] if many > 1.5 * few or many >= LOWERED else []


def lowered(layers: int) -> float:
    """Seconds of one core, the least of three: the first lowering in a process does more."""
    cfg = dataclasses.replace(weights.presets()["llama3-70b"], num_layers=layers)
    program = make_program(plan.Job(cfg, "v5p-128", sequence=4096))
    seconds = []
    for _ in range(3):
        jax.clear_caches()
        begin = time.process_time()
        program.lower()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def search(check: bool) -> None:
    found = plan.search(plan.Job("llama3.1-8b", "v5e-16"), batches=(1, 2), remats=("full", "qkv", "dots"))
    print(found)
    tried = len(found.plans) + len(found.refused)
    if check and (tried != 30 or found.seconds >= 600 or not found.best.compiled):
        sys.exit(f"{tried} layouts in {found.seconds:.0f} s: 30 have to be tried within 600, and the best compiled")


def present_table(names: list[str], out: Path | None, check: bool) -> None:
    rows, wrong = [], []
    print("| network, target | parameters | per chip | mesh, remat | peak GiB | flags | with them | peer |")
    print("|---" * 8 + "|")
    for name in names or PRESENT:
        row, peer, flags = PRESENT[name]
        usual = row.plan()
        got = row.plan(options=xla_flags.options(*flags)) if flags else usual
        mesh = " x ".join(f"{axis} {n}" for axis, n in got.mesh.items() if n > 1)
        what = [f"{got.num_parameters / 1e9:.1f}B", f"{row.per_device_batch_size}", f"{mesh}, `{row.remat}`"]
        sizes = [f"{usual.peak / GIB:.2f}", " ".join(flags), f"{got.peak / GIB:.2f}", f"{peer:.2f}"]
        print(f"| {name} | {' | '.join(what + sizes)} |", flush=True)
        rows.append(numbers(name, got) | {"usual": usual.peak, "peer": peer * GIB})
        if got.peak > peer * GIB:
            wrong.append(name)
    finish(rows, out, wrong if check else [], "more than the peer")


def published_table(names: list[str], out: Path | None, check: bool) -> None:
    rows, wrong = [], []
    print("| model, target | parameters | per chip | mesh, remat | peak GiB | analytic | again", end=" ")
    print("| step s | published | MFU | no overlap | published | of MFU |")
    print("|---" * 13 + "|")
    for name in names or ROWS:
        row, got = ROWS[name], ROWS[name].plan()
        print(f"| {name} | {' | '.join(beside(row, got))} |", flush=True)
        mfu = {"mfu": got.estimate.mfu, "mfu_serial": got.estimate.mfu_serial} if got.estimate else {"mfu": 0.0}
        rows.append(numbers(name, got) | mfu | {"published": row.mfu})
        if not got.fits or abs(error(got)) > 0.1 or mfu["mfu"] < row.mfu or again(got) > AGAIN:
            wrong.append(name)
    finish(rows, out, wrong if check else [], "does not fit, or analytic model or roofline are wrong")


def beside(row: Row, got: plan.Plan) -> list[str]:
    """Results of the compiler and the roofline, and measurements. again: FLOPs beyond the model's."""
    assert got.costs and got.estimate, "the program's text could not be read"
    devices, guess = got.target.devices, got.estimate
    mesh = " x ".join(f"{axis} {n}" for axis, n in got.mesh.items() if n > 1)
    measured = got.model_flops / (row.mfu * devices * got.target.chip.flops)
    return [
        f"{got.num_parameters / 1e9:.1f}B",
        f"{row.per_device_batch_size}",
        f"{mesh}, `{row.remat}`",
        f"{got.peak / GIB:.2f}",
        analytic(got),
        f"{again(got):.0%}",
        f"{guess.seconds:.2f}",
        f"{measured:.2f}",
        *[f"{share:.1%}" for share in (guess.mfu, guess.mfu_serial, row.mfu)],
        f"{row.mfu / guess.mfu:.0%}",
    ]


# FLOPs of a step in multiples of the model's, at most, where experts' buffers have room for more rows than arrive,
# twice an even share. maxlib's kernels for Hopper compute what arrives, JAX's for Blackwell all of it; plans count all.
PADDED = {"mixtral-8x7b ep8": 2.5}


def gpu_table(names: list[str], out: Path | None, check: bool) -> None:
    rows, wrong = [], []
    print("| model, target | sequences per GPU | mesh, attention | peak GiB | analytic | again | arithmetic s", end=" ")
    print("| memory s | network s | MFU | no overlap | lower s | compile s |")
    print("|---" * 13 + "|")
    for name in names or GPU_CASES:
        preset, target, batch, sequence, more = GPU_CASES[name]
        settings = {"attention": "mosaic_gpu"} | more
        got = plan.plan(plan.Job(preset, target, per_device_batch_size=batch, sequence=sequence, **settings))
        print(f"| {preset}, {target} | {batch} x {sequence} | {' | '.join(on_gpus(got))} |", flush=True)
        rows.append(numbers(name, got) | {"flops": again(got)})
        arithmetic = 1.2 <= 1 + again(got) <= PADDED.get(name, 1.4)
        fine = got.fits and abs(error(got)) <= 0.1 and arithmetic and got.compile_seconds < 120
        wrong += [] if fine else [name]
    finish(
        rows, out, wrong if check else [], "does not fit, or the analytic model, arithmetic or time to compile are off"
    )


def on_gpus(got: plan.Plan) -> list[str]:
    assert got.estimate, "the program's text could not be read"
    guess, attention = got.estimate, got.job.attention or "chunked"
    mesh = " x ".join(f"{axis} {n}" for axis, n in got.mesh.items() if n > 1)
    return [
        f"{mesh}, `{attention}`",
        f"{got.peak / GIB:.2f}",
        analytic(got),
        f"{again(got):.0%}",
        *[f"{seconds:.3f}" for seconds in (guess.compute, guess.memory, guess.network)],
        *[f"{share:.1%}" for share in (guess.mfu, guess.mfu_serial)],
        f"{got.lower_seconds:.1f}",
        f"{got.compile_seconds:.0f}",
    ]


AGAIN = 0.45  # of the model's FLOPs on top of them, at most: a third is full remat


def again(got: plan.Plan) -> float:
    """Arithmetic beyond the model's, as a share of it."""
    assert got.costs, "the program's text could not be read"
    return got.costs.flops * got.target.devices / got.model_flops - 1


def error(got: plan.Plan) -> float:
    return got.analytic.total / got.peak - 1


def analytic(got: plan.Plan) -> str:
    return f"{got.analytic.total / GIB:.2f} ({error(got):+.1%})"


def numbers(name: str, got: plan.Plan) -> dict[str, Any]:
    seconds = {"lower_seconds": got.lower_seconds, "compile_seconds": got.compile_seconds}
    return {"name": name, "peak": got.peak, "analytic": got.analytic.total} | seconds


def finish(rows: list[dict[str, Any]], out: Path | None, wrong: list[str], why: str) -> None:
    if out:
        out.write_text(json.dumps(rows, indent=1))
    if wrong:
        sys.exit(f"{why}: {', '.join(wrong)}")


def remat_table() -> None:
    print("| remat | peak GiB | kept for the backward pass, GiB | compiled FLOPs / the model's |")
    print("|---|---|---|---|")
    for remat in (*nn.remat.POLICIES, None):
        got = plan.plan(plan.Job("llama3.1-8b", "v5p-16", sequence=4096, remat=remat))
        flops = got.costs.flops * got.target.devices / got.model_flops if got.costs else float("nan")
        print(f"| {remat} | {got.peak / GIB:.2f} | {got.analytic.activations / GIB:.2f} | {flops:.2f} |", flush=True)


def pipelines(names: list[str], check: bool) -> None:
    """idle: the theoretical share. Bytes are those of one device in a step, in GiB: activations to the next stage, all
    else sent over stages, gathered weights, and the rest: gradients and the experts' tokens.
    """
    wrong = []
    print(
        "| plan | peak GiB | idle | FLOPs / the model's | to the next stage | over stages | gathered | other |", end=""
    )
    print(" MFU, no overlap | compile s |")
    print("|---" * 10 + "|")
    for name in names or PIPELINES:
        (model, target, sequence, batch), more = PIPELINES[name]
        got = plan.plan(plan.Job(model, target, sequence=sequence, per_device_batch_size=batch, **more))
        pipeline = next(one for one in got.job.layout.strategies if isinstance(one, sharding.Pipeline))
        turns, stages = pipeline.microbatches * pipeline.repeats, got.mesh["stage"]
        flops = got.costs.flops * got.target.devices / got.model_flops if got.costs else float("nan")
        mfu = f"{got.estimate.mfu_serial:.1%}" if got.estimate else "-"
        idle = f"{(stages - 1) / (turns + stages - 1):.0%}"
        sizes = " | ".join(f"{size / GIB:.2f}" for size in travels(got))
        print(
            f"| {name} | {got.peak / GIB:.2f} | {idle} | {flops:.2f} | {sizes} | {mfu} | {got.compile_seconds:.0f} |",
            flush=True,
        )
        if not got.fits:
            wrong.append(name)
    finish([], None, wrong if check else [], "does not fit")


def travels(got: plan.Plan) -> list[float]:
    found = got.costs.collectives if got.costs else ()
    over = lambda one: "stage" in one.axes
    on = lambda one: over(one) and one.kind in ("collective-permute", "send")
    kinds = (on, lambda one: over(one) and not on(one), lambda one: not over(one) and one.kind == "all-gather")
    sizes = [sum(one.bytes for one in found if is_one(one)) for is_one in kinds]
    return [*sizes, sum(one.bytes for one in found) - sum(sizes)]


if __name__ == "__main__":
    main()
