"""`python -m maxlib.plan llama3-70b --target v5p-128`."""

import argparse
import re
import sys
from typing import Any

import jax

from maxlib import xla_flags
from maxlib.nn import POLICIES
from maxlib.plan import Search, plan, search
from maxlib.sharding import PRESETS


def main(arguments: list[str] | None = None) -> int:
    """Prints a report; returns 0 when the step fits, 1 when it does not, 2 for bad input."""
    args = _parser().parse_args(arguments)
    try:
        if args.search:
            found = search(
                args.model, args.target, sequence=args.sequence, optimizer=args.optimizer, compile=args.compile
            )
            print(found)
            return _best(found)
        result = plan(
            args.model,
            args.target,
            batch_per_chip=args.batch_per_chip,
            sequence=args.sequence,
            mesh=_degrees(args.mesh),
            dcn=_degrees(args.dcn) or None,
            rules=args.rules,
            remat=_remat(args.remat),
            attention=args.attention,
            optimizer=args.optimizer,
            accumulate=args.accumulate,
            gradients=args.gradients,
            options=xla_flags.options(*args.flags),
            full=args.full,
            keep=args.keep,
        )
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"maxlib.plan: {error}", file=sys.stderr)
        return 2
    print(result)
    return 0 if result.fits else 1


def _best(found: Search) -> int:
    try:
        print(found.best)
    except ValueError as nothing_fits:
        print(f"maxlib.plan: {nothing_fits}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxlib.plan", description="Plan a training run before paying for the chips."
    )
    add = parser.add_argument
    add("model", help="a preset, such as llama3-70b")
    add(
        "--target",
        required=True,
        help="v5e-256, v5p-128 (cores: 64 chips), v6e-64, v5p:4x4x8, v5e-256x2 (two slices), h100x8, cpu",
    )
    add("--batch-per-chip", type=float, default=1, help="sequences per chip in a step (default 1)")
    add("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    add("--mesh", nargs="*", default=["fsdp=-1"], help="degrees, such as fsdp=-1 tensor=4 (default fsdp=-1)")
    add("--dcn", nargs="*", default=[], help="degrees across slices, such as data=-1")
    add(
        "--rules",
        default="fsdp",
        help=f"{', '.join(PRESETS)}, or several: fsdp_tp+cp_ring+pp:16x2, 16 microbatches twice around (default fsdp)",
    )
    add(
        "--remat",
        default="full",
        help=f"none, {', '.join(POLICIES)}, or intermediates kept or sent to the host: q,k,v=offload (default full)",
    )
    add("--attention", help="its implementation in all layers, such as mosaic_tpu (default: the best that may run)")
    add("--optimizer", default="adamw", help="adamw (default) or sgd")
    add("--accumulate", type=int, default=1, help="microbatches of a step (default 1)")
    add("--gradients", choices=["1f1b"], help="1f1b for pipelines (default: autodiff, which makes them GPipe)")
    add("--flags", nargs="*", default=[], help="sets of XLA flags, such as tpu-overlap (python -m maxlib.xla_flags)")
    add("--full", action="store_true", help="also make the machine code, which takes minutes")
    add("--keep", help="an empty folder for the compiler's files")
    add("--search", action="store_true", help="try layouts x remat x batch instead, and report the best")
    add("--compile", type=int, default=3, help="how many of them to compile (default 3)")
    return parser


def _remat(text: str) -> Any:
    """none, the name of a policy, or a choice for some intermediates: q,k,v=offload keeps q and k and offloads v."""
    if text == "none":
        return None
    words = [word.partition("=") for word in text.split(",")]
    return text if text in POLICIES else {name: choice or "keep" for name, _, choice in words}


def _degrees(words: list[str]) -> dict[str, int]:
    if wrong := [word for word in words if not re.fullmatch(r"\w+=-?\d+", word)]:
        raise ValueError(f"a degree reads axis=number, such as fsdp=-1; got {wrong[0]!r}")
    return {name: int(degree) for name, _, degree in (word.partition("=") for word in words)}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing runs here; an accelerator would only be kept busy
    sys.exit(main())
