"""The command `maxlib plan llama3-70b --target v5p-128`."""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

from maxlib import adapters, quantization, training
from maxlib.distributed import xla_flags
from maxlib.nn.remat import POLICIES
from maxlib.plan import Job, Plan, parse_target, plan, search
from maxlib.sharding import PRESETS, Layout, parse_degrees, preset


def main(arguments: list[str] | None = None) -> int:
    """Prints a report; returns 0 when the step fits, 1 when it does not, 2 for bad input."""
    args = parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for module:function; the script `maxlib` starts without the current directory
    try:
        return _search(args) if args.search else _plan(args)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        _log(f"maxlib plan: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    if args.compile is not None:
        raise ValueError("--compile is for --search: without it the one plan is compiled")
    result = plan(_job(args), full=args.full, keep=args.keep)
    print(json.dumps(_numbers(result), indent=1)) if args.json else _log(result)
    return 0 if result.fits else 1


def _search(args: argparse.Namespace) -> int:
    """Searches over layouts, remat and batch; options given on the command line are fixed."""
    if args.json:
        raise ValueError("--json prints one plan: leave out --search")
    if args.full or args.keep:
        raise ValueError("--search takes no --full and no --keep: plan the layout that it finds again, with them")
    fixed: dict[str, Any] = {}
    job = _job(args)
    if args.mesh or args.strategy:
        fixed["layouts"] = [job.layout]
    if args.remat:
        fixed["remats"] = [job.remat]
    if args.per_device_batch_size is not None:
        fixed["batches"] = [job.per_device_batch_size]
    if args.compile is not None:
        fixed["compile"] = args.compile
    result = search(job, **fixed)
    _log(result)
    try:
        _log(result.best)
    except ValueError as nothing_fits:
        _log(f"maxlib plan: {nothing_fits}", file=sys.stderr)
        return 1
    return 0


def _job(args: argparse.Namespace) -> Job:
    """Returns the job that the options describe."""
    return Job(
        args.model,
        args.target,
        layout=_layout(args),
        per_device_batch_size=1 if args.per_device_batch_size is None else args.per_device_batch_size,
        sequence=args.sequence,
        remat=_remat(args.remat or "full"),
        attention=args.attention,
        optimizer=args.optimizer,
        loss=args.loss or training.NextToken(),
        microbatches=args.microbatches,
        batch=args.batch,
        lora=None if args.lora is None else _lora(args.lora),
        base=args.base,
        quantization=args.quantization,
        options=xla_flags.options(*args.flags),
    )


def _layout(args: argparse.Namespace) -> Layout:
    slices, dcn = parse_target(args.target).slices, parse_degrees(*args.dcn)
    if slices > 1 and not dcn:
        raise ValueError(
            f"{args.target} has {slices} slices, which a slower network joins: say which axis crosses it, for example "
            "--dcn data=-1"
        )
    degrees = parse_degrees(*args.mesh) or {"fsdp": -1}
    return Layout({**degrees, "dcn": dcn}, preset(args.strategy or "fsdp"))


def _lora(words: list[str]) -> adapters.LoRA:
    """Parses --lora: rank=16,alpha=32,dora; alpha is twice the rank by default."""
    parts = [word.partition("=") for word in ",".join(words).split(",") if word]
    settings = {name: value for name, _, value in parts}
    flags = {name: True for name in ("dora", "rslora") if name in settings}
    try:
        if settings.keys() - {"rank", "alpha", "dora", "rslora"}:
            raise ValueError
        rank = int(settings["rank"])
        alpha = float(settings.get("alpha", 2 * rank))
    except (KeyError, ValueError):
        raise ValueError(
            "--lora takes rank=16,alpha=32 (numbers) and dora or rslora, of which rank is needed; got "
            f"{' '.join(words)!r}"
        ) from None
    return adapters.LoRA(rank, alpha, **flags)


def _numbers(result: Plan) -> dict[str, Any]:
    """Returns a plan as a JSON object, without the job."""
    parts = {name: getattr(result, name) for name in ("costs", "estimate", "analytic")}
    plain = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    named = {"target": result.target.name, "capacity": result.target.chip.memory, "fits": result.fits}
    numbers = {name: value for name, value in plain.items() if isinstance(value, int | float | dict | None)}
    nested = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
    return json.loads(json.dumps(named | numbers | nested, default=str))


# Advice in error messages for Python -> the same for the command line.
_HERE = {
    "change a degree, let one be -1, or pass devices=": "change a degree of --mesh or --dcn, or let one be -1",
    "per_device_batch_size": "--per-device-batch-size",
    "microbatches=": "--microbatches ",
    "remat='full'": "--remat full",
    "plan.search": "--search",
    "strategy=": "--strategy ",
    "sequence=": "--sequence ",
    "lora=LoRA(16)": "--lora rank=16",
    "base='nf4'": "--base nf4",
    "base=": "--base ",
    "give lora": "give --lora",
}


def _log(text: Any, file: Any = None) -> None:
    text = str(text)
    for python, here in _HERE.items():
        text = text.replace(python, here)
    print(text, file=file)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxlib plan", description="Plan a training run before paying for the chips.")
    add = parser.add_argument
    add("model", help="a preset, such as llama3-70b, or module:function of your own that builds a model")
    add(
        "--target",
        required=True,
        help="v5e-256, v5p-128 (cores: 64 chips), v6e-64, v5p:4x4x8, v5e-256x2 (two slices), h100x8, cpu",
    )
    add("--per-device-batch-size", type=float, help="sequences per chip in a step (default 1)")
    add("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    add("--mesh", nargs="*", default=[], help="degrees, such as fsdp=-1,tensor=4 (default fsdp=-1)")
    add("--dcn", nargs="*", default=[], help="degrees across slices, such as data=-1")
    add(
        "--strategy",
        help=f"{', '.join(PRESETS)}, or several: fsdp_tp+cp_ring+pp_1f1b:16x2, 16 microbatches twice around (default fsdp)",
    )
    add(
        "--remat",
        help=f"none, {', '.join(POLICIES)}, or intermediates kept or sent to the host: q,k,v=offload (default full)",
    )
    add("--attention", help="attention implementation of all layers, such as splash (default: the best available)")
    add("--optimizer", default="adamw", help="adamw (default), sgd, or module:function of a model")
    add(
        "--microbatches", type=int, default=1, help="parts of a batch that a step takes one after the other (default 1)"
    )
    add(
        "--loss",
        help="module:name of a training.Loss, or of a function that takes dtype and remat (default: next token)",
    )
    add("--batch", help="module:name of a function (rows, sequence) -> {name: shape} of the loss's other inputs")
    add(
        "--lora",
        nargs="*",
        help="train adapters of a frozen base: rank=16,alpha=32,dora (default alpha: twice the rank)",
    )
    add("--base", help="storage format of their base: float32, bfloat16, int8, nf4 (default: bfloat16)")
    add(
        "--quantization",
        choices=sorted(quantization.TRAINING),
        help="quantization of matmuls in training (default: none)",
    )
    add(
        "--flags",
        nargs="*",
        default=[],
        help="sets of XLA flags, such as tpu-overlap (python -m maxlib.distributed.xla_flags)",
    )
    add("--full", action="store_true", help="also generate machine code, which takes minutes")
    add("--json", action="store_true", help="print one object; sizes are bytes on one device")
    add("--keep", help="an empty folder for the compiler's files")
    add(
        "--search",
        action="store_true",
        help="search over layouts x remat x batch, except for given values, and report the best",
    )
    add("--compile", type=int, help="number of layouts of a search to compile (default 3)")
    return parser


def _remat(text: str) -> Any:
    """Parses --remat: none, a policy, or choices for intermediates (`q,k,v=offload` keeps q and k and offloads v)."""
    if text == "none":
        return None
    words = [word.partition("=") for word in text.split(",")]
    return text if text in POLICIES else {name: choice or "keep" for name, _, choice in words}
