"""`maxlib plan MODEL --target HARDWARE`: plans a training step for hardware that you do not have."""

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` imports none of these
    from maxlib import adapters, plan, sharding

# The names of `sharding.PRESETS`, `nn.remat.POLICIES` and `quantization.TRAINING`, whose modules import jax.
STRATEGIES = (
    "dp, zero1, fsdp, fsdp_by_expert, tp, tp_sp, fsdp_tp, fsdp_tp_sp, ep, ep_tp, exchange_dense, exchange_ragged, "
    "cp_ring, cp_gather, cp_ulysses, pp, pp_1f1b, offload_optimizer, offload_layers"
)
REMATS = "full, attention, qkv, qkv_offload, dots_except_mlp, dots, minimal, minimal_offload"
QUANTIZATIONS = (
    "fp8",
    "fp8_block",
    "int4_qat",
    "int4_w4a8_qat",
    "int8",
    "int8_gradients",
    "mxfp4_qat",
    "nvfp4",
    "nvfp4_qat",
)


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("model", help="a preset, such as llama3-70b, or module:function of your own that builds a model")
    option(
        "--target",
        required=True,
        help="v5e-256, v5p-128 (cores: 64 chips), v6e-64, v5p:4x4x8, v5e-256x2 (two slices), h100x8, cpu",
    )
    option("--per-device-batch-size", type=float, help="sequences per chip in a step (default 1)")
    option("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    option("--mesh", nargs="*", default=[], help="degrees, such as fsdp=-1,tensor=4 (default fsdp=-1)")
    option("--dcn", nargs="*", default=[], help="degrees across slices, such as data=-1")
    option(
        "--strategy",
        help=f"{STRATEGIES}, or several: fsdp_tp+cp_ring+pp_1f1b:16x2, 16 microbatches twice around (default fsdp)",
    )
    option(
        "--remat",
        help=f"none, {REMATS}, or intermediates kept or sent to the host: q,k,v=offload (default full)",
    )
    option("--attention", help="attention implementation of all layers, such as splash (default: the best available)")
    option("--optimizer", default="adamw", help="adamw (default), muon, sgd, or module:function of a model")
    option(
        "--microbatches", type=int, default=1, help="parts of a batch that a step takes one after the other (default 1)"
    )
    option(
        "--loss",
        help="module:name of a training.Loss, or of a function that takes dtype and remat (default: next token)",
    )
    option("--batch", help="module:name of a function (rows, sequence) -> {name: shape} of the loss's other inputs")
    option(
        "--lora",
        nargs="*",
        help="train adapters of a frozen base: rank=16,alpha=32,dora (default alpha: twice the rank)",
    )
    option("--base", help="storage format of their base: float32, bfloat16, int8, nf4 (default: bfloat16)")
    option(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantization of matmuls in training (default: none)",
    )
    option(
        "--flags",
        nargs="*",
        default=[],
        help="sets of XLA flags, such as tpu-overlap (python -m maxlib.distributed.xla_flags)",
    )
    option("--full", action="store_true", help="also generate machine code, which takes minutes")
    option("--json", action="store_true", help="print one object; sizes are bytes on one device")
    option("--keep", help="an empty folder for the compiler's files")
    option(
        "--search",
        action="store_true",
        help="search over layouts x remat x batch, except for given values, and report the best",
    )
    option("--compile", type=int, help="number of layouts of a search to compile (default 3)")


def run(args: argparse.Namespace) -> int:
    """Prints a report; returns 0 when the step fits, 1 when it does not."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device; do not occupy an accelerator
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for module:function; the script `maxlib` starts without the current directory
    return _search(args) if args.search else _plan(args)


def _plan(args: argparse.Namespace) -> int:
    from maxlib import plan

    if args.compile is not None:
        raise ValueError("--compile is for --search: without it the one plan is compiled")
    result = plan.plan(_job(args), full=args.full, keep=args.keep)
    print(json.dumps(_numbers(result), indent=1) if args.json else result)
    return 0 if result.fits else 1


def _search(args: argparse.Namespace) -> int:
    """Searches over layouts, remat and batch; options given on the command line are fixed."""
    from maxlib import plan

    if args.json or args.full or args.keep:
        raise ValueError("--search takes no --json, --full and --keep: plan the layout that it finds again, with them")
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
    result = plan.search(job, **fixed)
    print(result)
    try:
        print(result.best)
    except ValueError as nothing_fits:
        print(f"maxlib plan: {nothing_fits}", file=sys.stderr)
        return 1
    return 0


def _job(args: argparse.Namespace) -> "plan.Job":
    """Returns the job that the options describe."""
    from maxlib import plan, training
    from maxlib.distributed import xla_flags

    return plan.Job(
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


def _layout(args: argparse.Namespace) -> "sharding.Layout":
    from maxlib import plan, sharding

    slices, dcn = plan.parse_target(args.target).slices, sharding.parse_degrees(*args.dcn)
    if slices > 1 and not dcn:
        raise ValueError(
            f"{args.target} has {slices} slices, which a slower network joins: say which axis crosses it, for example "
            "--dcn data=-1"
        )
    degrees = sharding.parse_degrees(*args.mesh) or {"fsdp": -1}
    return sharding.Layout({**degrees, "dcn": dcn}, sharding.preset(args.strategy or "fsdp"))


def _lora(words: list[str]) -> "adapters.LoRA":
    """Parses --lora: rank=16,alpha=32,dora; alpha is twice the rank by default."""
    from maxlib import adapters

    parts = [word.partition("=") for word in ",".join(words).split(",") if word]
    settings = {name: value for name, _, value in parts}
    try:
        flags = {name: settings.get(name) for name in ("dora", "rslora")}
        if settings.keys() - {"rank", "alpha", *flags} or any(flags.values()):
            raise ValueError
        rank = int(settings["rank"])
        alpha = float(settings.get("alpha", 2 * rank))
    except (KeyError, ValueError):
        raise ValueError(
            f"--lora takes rank=16,alpha=32 (numbers) and dora or rslora, of which rank is needed; got {' '.join(words)!r}"
        ) from None
    return adapters.LoRA(rank, alpha, dora="dora" in settings, rslora="rslora" in settings)


def _remat(text: str) -> Any:
    """Parses --remat: none, a policy, or choices for intermediates (`q,k,v=offload` keeps q and k and offloads v)."""
    from maxlib.nn.remat import POLICIES

    if text == "none":
        return None
    words = [word.partition("=") for word in text.split(",")]
    return text if text in POLICIES else {name: choice or "keep" for name, _, choice in words}


def _numbers(result: "plan.Plan") -> dict[str, Any]:
    """Returns a plan as a JSON object, without the job."""
    parts = {name: getattr(result, name) for name in ("costs", "estimate", "analytic")}
    plain = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    named = {"target": result.target.name, "capacity": result.target.chip.memory, "fits": result.fits}
    numbers = {name: value for name, value in plain.items() if isinstance(value, int | float | dict | None)}
    nested = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
    return json.loads(json.dumps(named | numbers | nested, default=str))
