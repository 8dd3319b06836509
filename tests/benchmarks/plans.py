"""Memory and collectives of training steps compiled for TPUs and GPUs without hardware; on TPUs compared with MaxText's
ahead-of-time compilation.

    python -m tests.benchmarks.plans [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --published [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --maxtext [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --present [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --pipelines [NAME ...] [--check]
    python -m tests.benchmarks.plans --search [--check]
    python -m tests.benchmarks.plans --gpu [NAME ...] [--json out.json] [--check]

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU; --gpu needs jax's plugin for CUDA (`pip install "maxlib[cuda]"`), no
GPU. float32 parameters and Adam moments, bfloat16 arithmetic, full remat, scanned layers, one sequence per chip. The
peer's figures: commit e591f30, libtpu 0.0.51, flash kernel, the same settings. --check ends with an error if a step
needs more than the peer's or writes more collectives, computes more than 1.45 times the model's FLOPs, the analytic
model is off by more than a tenth, 70B takes 3 s to lower or, where no NAME is given, 160 layers half as long again as
8. --maxtext: the same steps beside MaxText 0.2.5 of the package index, both by the installed compiler, with Python 3.12
and what `nox -s plans_maxtext` installs; --check ends with an error if one needs more. --published: the configurations
of MaxText's tables of MFU (`published.py`), each beside what was measured; --check ends with an error if one does not
fit, computes more than that, the analytic model is off by more than a tenth, or the roofline is lower than what was
measured. --present: the networks that the same scripts build today, beside the peer's memory; --check ends with an
error if one needs more. --pipelines: `PIPELINES`; --check ends with an error if one does not fit. --search: 30 layouts
of an 8B model on 16 chips; --check ends with an error if that takes ten minutes, or none of them fits. --gpu: steps for
H100 and H200; --check ends with an error if one does not fit, the analytic model is off by more than a tenth,
arithmetic is not 1.2 to 1.4 times the model's, or compiling takes two minutes.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from maxlib import plan, sharding, weights
from maxlib.distributed import xla_flags
from maxlib.plan._program import make_program
from maxlib.plan._targets import has_gpu_compiler
from tests.benchmarks import _maxtext
from tests.benchmarks._maxtext import GIB, Peer
from tests.benchmarks.published import PRESENT, ROWS
from tests.plan.jobs import layout

EXPERTS_BY_NUMBER = {"layout": layout("fsdp_by_expert")}
DEEPSEEK = "deepseek-v3", "v5p-512", 4096


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
# As `CASES`, for networks that the peer's commit does not have.
NEWER: dict[str, tuple[Any, str, int, Peer | None, dict[str, Any]]] = {
    "deepseek-v4-flash": ("deepseek-v4-flash", "v5p-128", 4096, None, {"layout": layout("ep", fsdp=16, expert=4)}),
    "qwen3-omni-30b-a3b": ("qwen3-omni-30b-a3b", "v5p-128", 4096, None, {}),
}
# The steps of both by MaxText's settings.
MAXTEXT = {
    "llama2-7b": "model_name=llama2-7b",
    "llama3.1-8b": "model_name=llama3.1-8b",
    "mixtral-8x7b": "model_name=mixtral-8x7b",
    "mixtral-8x22b": "model_name=mixtral-8x22b",
    "llama2-70b": "model_name=llama2-70b",
    "llama3.1-405b": "model_name=llama3.1-405b",
    "deepseek-v3": "model_name=deepseek3-671b",
    "deepseek-v3 ep8": "model_name=deepseek3-671b",
    # Flash attention over compressed keys, heads of the choice of keys and the loss in parts.
    "deepseek-v4-flash": "model_name=deepseek4-284b use_tokamax_splash=True csa_qk_head_chunk_size=8 num_vocab_tiling=8",
    "qwen3-30b-a3b": "model_name=qwen3-30b-a3b",
    # Text, because MaxText does not scan layers that take images. Ours has the parameters of both encoders besides.
    "qwen3-omni-30b-a3b": "model_name=qwen3-omni-30b-a3b scan_layers=True deepstack_visual_indexes_for_vit=[] "
    "use_multimodal=False use_audio=False use_mrope=False",
    "gpt-oss-20b": "model_name=gpt-oss-20b",
    "llama4-17b-16e": "model_name=llama4-17b-16e",
    "qwen3-next-80b-a3b": "model_name=qwen3-next-80b-a3b",
    "qwen3-next-80b-a3b ep8": "model_name=qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b text": "model_name=qwen3.5-35b-a3b",
    "gemma4-31b text": "model_name=gemma4-31b",
    "gemma4-26b-a4b text": "model_name=gemma4-26b",
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


Row = tuple[dict[str, Any], list[str]]  # what a table shows of a plan, and the bounds that it misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    for option in ("--check", "--maxtext", "--published", "--present", "--pipelines", "--search", "--gpu"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if args.gpu and not has_gpu_compiler():
        print('skipped: plans for GPUs need jax\'s plugin for CUDA, pip install "maxlib[cuda]"')
        return
    if not args.gpu and importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
        return
    if args.search:
        wrong = search()
    elif args.gpu:
        wrong = table(args.names or GPU_CASES, on_gpus, args.json)
    elif args.pipelines:
        wrong = table(args.names or PIPELINES, pipelined, args.json)
    elif args.maxtext:
        wrong = table(args.names or MAXTEXT, beside_compiled, args.json)
    elif args.published:
        wrong = table(args.names or ROWS, beside_measured, args.json)
    elif args.present:
        wrong = table(args.names or PRESENT, present, args.json)
    else:
        wrong = table(args.names or CASES, beside_peer, args.json)
        wrong += [] if args.names else lowering()
    print(*wrong, sep="\n")
    sys.exit(1 if args.check and wrong else 0)


def table(names: Iterable[str], row_of: Callable[[str], Row], out: Path | None) -> list[str]:
    """Prints a row for each name, and returns the bounds that they miss."""
    rows, wrong = [], []
    for name in names:
        cells, faults = row_of(name)
        if not rows:
            print(f"| | {' | '.join(cells)} |\n{'|---' * (1 + len(cells))}|")
        print(f"| {name} | {' | '.join(map(str, cells.values()))} |", flush=True)
        rows.append({"name": name} | cells)
        wrong += [f"{name}: {fault}" for fault in faults]
    if out:
        out.write_text(json.dumps(rows, indent=1))
    return wrong


def beside_peer(name: str) -> Row:
    preset, target, sequence, peer, more = CASES[name]
    got = plan.plan(plan.Job(preset, target, sequence=sequence, **more))
    written, moved = sum(c.written for c in got.costs.collectives), sum(c.bytes for c in got.costs.collectives) / GIB
    cells = {
        "target": f"{target}, {sequence}",
        "peak GiB": f"{got.peak / GIB:.2f}",
        "analytic": analytic(got),
        "peer": "not measured" if peer is None else peer.peak or "does not fit",
        "collectives": " / ".join(f"{c.written} {c.kind}" for c in got.costs.collectives),
        "moved GiB": f"{moved:.2f}",
        "peer moves": peer.moved or "" if peer else "",
        "lower s": f"{got.lower_seconds:.1f}",
        "compile s": f"{got.compile_seconds:.0f}",
    }
    most = peer.peak * GIB if peer and peer.peak else got.target.chip.memory
    wrong = bounds(got) + ([f"peak {got.peak / GIB:.2f} GiB for {most / GIB:.2f}"] if got.peak > most else [])
    dense = "70b" in got.job.title  # the model for which the time to lower was promised
    wrong += [f"lowered in {got.lower_seconds:.1f} s"] if dense and got.lower_seconds >= LOWERED else []
    if peer and peer.written is not None and written > peer.written:
        wrong.append(f"{written} collectives for {peer.written}")
    if peer and peer.moved is not None and moved > 1.0001 * peer.moved:
        wrong.append(f"{moved:.2f} GiB moved for {peer.moved}")
    return cells, wrong


def beside_compiled(name: str) -> Row:
    """Compiles a case and MaxText's step beside it."""
    preset, target, sequence, _, more = (CASES | NEWER)[name]
    got = plan.plan(plan.Job(preset, target, sequence=sequence, **more))
    written, moved = sum(c.written for c in got.costs.collectives), sum(c.bytes for c in got.costs.collectives) / GIB
    axes = {axis: degree for axis, degree in got.mesh.items() if degree > 1}
    peer = _maxtext.compiled(target, sequence, axes, MAXTEXT[name].split())
    cells = {
        "target": f"{target}, {sequence}",
        "mesh": mesh(got),
        "peak GiB": f"{got.peak / GIB:.2f}",
        "MaxText's": f"{peer.peak:.2f}" if peer.peak else "does not fit",
        "collectives": written,
        "MaxText's collectives": peer.written,
        "moved GiB": f"{moved:.2f}",
        "MaxText moves": peer.moved and f"{peer.moved:.2f}",
        "libtpu": importlib.metadata.version("libtpu"),
    }
    most = peer.peak * GIB if peer.peak else got.target.chip.memory
    return cells, ["more than MaxText"] if got.peak > most else []


LOWERED = 3.0  # seconds, at most
AGAIN = 0.45  # of the model's FLOPs on top of them, at most: a third is full remat


def bounds(got: plan.Plan) -> list[str]:
    """Returns the bounds that any step misses."""
    wrong = [f"analytic model {error(got):+.1%}"] if abs(error(got)) > 0.1 else []
    return wrong + ([f"{got.flops_factor:.2f} times the model's FLOPs"] if got.flops_factor > 1 + AGAIN else [])


def error(got: plan.Plan) -> float:
    return got.analytic.total / got.peak - 1


def analytic(got: plan.Plan) -> str:
    return f"{got.analytic.total / GIB:.2f} ({error(got):+.1%})"


def mesh(got: plan.Plan) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in got.mesh.items() if n > 1)


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


def search() -> list[str]:
    result = plan.search(plan.Job("llama3.1-8b", "v5e-16"), batches=(1, 2), remats=("full", "qkv", "dots"))
    print(result)
    tried = len(result.plans) + len(result.refused)
    fine = tried == 30 and result.seconds < 600 and result.best.compiled
    return [] if fine else [f"{tried} layouts in {result.seconds:.0f} s: 30 within 600, and the best compiled"]


def present(name: str) -> Row:
    row, peer, flags = PRESENT[name]
    usual = row.plan()
    got = row.plan(options=xla_flags.options(*flags)) if flags else usual
    cells = {
        "parameters": f"{got.num_parameters / 1e9:.1f}B",
        "per chip": row.per_device_batch_size,
        "mesh, remat": f"{mesh(got)}, `{row.remat}`",
        "peak GiB": f"{usual.peak / GIB:.2f}",
        "flags": " ".join(flags),
        "with them": f"{got.peak / GIB:.2f}",
        "peer": peer,
    }
    return cells, ["more than the peer"] if got.peak > peer * GIB else []


def beside_measured(name: str) -> Row:
    row, got = ROWS[name], ROWS[name].plan()
    measured = got.model_flops / (row.mfu * got.target.devices * got.target.chip.flops)
    cells = {
        "parameters": f"{got.num_parameters / 1e9:.1f}B",
        "per chip": row.per_device_batch_size,
        "mesh, remat": f"{mesh(got)}, `{row.remat}`",
        "peak GiB": f"{got.peak / GIB:.2f}",
        "analytic": analytic(got),
        "FLOPs / the model's": f"{got.flops_factor:.2f}",
        "step s": f"{got.estimate.seconds:.2f}",
        "published s": f"{measured:.2f}",
        "MFU": f"{got.estimate.mfu:.1%}",
        "no overlap": f"{got.estimate.mfu_serial:.1%}",
        "published": f"{row.mfu:.1%}",
    }
    wrong = bounds(got) + ([] if got.fits else ["does not fit"])
    return cells, wrong + (["the roofline is lower than measured"] if got.estimate.mfu < row.mfu else [])


# FLOPs of a step in multiples of the model's, at most, where experts' buffers have room for more rows than arrive,
# twice an even share. maxlib's kernels for Hopper compute what arrives, JAX's for Blackwell all of it; plans count all.
PADDED = {"mixtral-8x7b ep8": 2.5}


def on_gpus(name: str) -> Row:
    preset, target, batch, sequence, more = GPU_CASES[name]
    settings = {"attention": "mosaic_gpu"} | more
    got = plan.plan(plan.Job(preset, target, per_device_batch_size=batch, sequence=sequence, **settings))
    cells = {
        "target": target,
        "sequences per GPU": f"{batch} x {sequence}",
        "mesh, attention": f"{mesh(got)}, `{got.job.attention}`",
        "peak GiB": f"{got.peak / GIB:.2f}",
        "analytic": analytic(got),
        "FLOPs / the model's": f"{got.flops_factor:.2f}",
        "arithmetic s": f"{got.estimate.compute:.3f}",
        "memory s": f"{got.estimate.memory:.3f}",
        "network s": f"{got.estimate.network:.3f}",
        "MFU": f"{got.estimate.mfu:.1%}",
        "no overlap": f"{got.estimate.mfu_serial:.1%}",
        "lower s": f"{got.lower_seconds:.1f}",
        "compile s": f"{got.compile_seconds:.0f}",
    }
    fine = got.fits and abs(error(got)) <= 0.1 and got.compile_seconds < 120
    arithmetic = 1.2 <= got.flops_factor <= PADDED.get(name, 1.4)
    return cells, [] if fine and arithmetic else ["does not fit, or memory, arithmetic or time to compile are off"]


def pipelined(name: str) -> Row:
    """idle: the theoretical share. Bytes are those of one device in a step, in GiB: activations to the next stage, all
    else sent over stages, gathered weights, and the rest: gradients and the experts' tokens.
    """
    (model, target, sequence, batch), more = PIPELINES[name]
    got = plan.plan(plan.Job(model, target, sequence=sequence, per_device_batch_size=batch, **more))
    pipeline = next(part for part in got.job.layout.strategies if isinstance(part, sharding.Pipeline))
    turns, stages = pipeline.microbatches * pipeline.repeats, got.mesh["stage"]
    sizes = {"to the next stage": 0.0, "over stages": 0.0, "gathered": 0.0, "other": 0.0}
    for c in got.costs.collectives:
        if "stage" in c.axes:
            place = "to the next stage" if c.kind in ("collective-permute", "send") else "over stages"
        else:
            place = "gathered" if c.kind == "all-gather" else "other"
        sizes[place] += c.bytes / GIB
    cells = {
        "peak GiB": f"{got.peak / GIB:.2f}",
        "idle": f"{(stages - 1) / (turns + stages - 1):.0%}",
        "FLOPs / the model's": f"{got.flops_factor:.2f}",
        **{place: f"{size:.2f}" for place, size in sizes.items()},
        "MFU, no overlap": f"{got.estimate.mfu_serial:.1%}",
        "compile s": f"{got.compile_seconds:.0f}",
    }
    return cells, [] if got.fits else ["does not fit"]


if __name__ == "__main__":
    main()
