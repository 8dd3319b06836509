"""Memory and collectives of training steps on TPUs that are not there, beside MaxText's own ahead-of-time compile.

    python -m tests.benchmarks.plans [NAME ...] [--json out.json] [--check]
    python -m tests.benchmarks.plans --remat
    python -m tests.benchmarks.plans --search

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU. float32 parameters and Adam moments, bfloat16 arithmetic, full
remat, scanned layers, one sequence per chip. The peer's figures: commit e591f30, libtpu 0.0.51, flash kernel, the same
settings. --check ends with an error if a step needs more than the peer's, or the analytic model is off by more than a
tenth. --remat: one model under every policy. --search: 30 layouts of an 8B model on 16 chips.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from maxlib import nn, plan

GIB = 2**30
EXPERTS_BY_NUMBER = {"rules": "ep_fsdp"}
DEEPSEEK = "deepseek-v3", "v5p-512", 4096
# preset, target, sequence, the peer's peak GiB (None: it does not fit), other settings
CASES: dict[str, tuple[str, str, int, float | None, dict[str, Any]]] = {
    "llama2-7b": ("llama2-7b", "v5p-8", 2048, 29.04, {}),
    "llama3.1-8b": ("llama3.1-8b", "v5e-16", 2048, 9.32, {}),
    "mixtral-8x7b": ("mixtral-8x7b", "v5p-128", 4096, 17.50, {}),
    "llama2-70b": ("llama2-70b", "v5p-128", 4096, 25.87, {}),
    "llama3.1-405b": ("llama3.1-405b", "v5p-512", 8192, 71.82, {}),
    "deepseek-v3": (*DEEPSEEK, 77.52, EXPERTS_BY_NUMBER),
    "deepseek-v3 ep8": (*DEEPSEEK, 71.53, {"mesh": {"fsdp": 32, "expert": 8}, "rules": "ep"}),
    "deepseek-v3 ep64": (*DEEPSEEK, None, {"mesh": {"fsdp": 4, "expert": 64}, "rules": "ep"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    for option in ("--check", "--remat", "--search"):
        parser.add_argument(option, action="store_true")
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
    elif args.search:
        print(plan.search("llama3.1-8b", "v5e-16", batches=(1, 2), remats=("full", "qkv", "dots")))
    elif args.remat:
        remat_table()
    else:
        compare(args.names or [*CASES], args.json, args.check)


def compare(names: list[str], out: Path | None, check: bool) -> None:
    rows, wrong = [], []
    print("| model, target | sequence | peak GiB | analytic | peer | collectives | lower s | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        preset, target, sequence, peer, more = CASES[name]
        got = plan.plan(preset, target, sequence=sequence, **more)
        kinds = [f"{one.written} {one.kind}" for one in got.costs.collectives] if got.costs else ["not readable"]
        sizes = [f"{got.peak / GIB:.2f}", f"{got.analytic.total / GIB:.2f}", f"{peer:.2f}" if peer else "does not fit"]
        row = [*sizes, " / ".join(kinds), f"{got.lower_seconds:.1f}", f"{got.compile_seconds:.0f}"]
        print(f"| {name}, {target} | {sequence} | {' | '.join(row)} |", flush=True)
        rows.append({"name": name, "peak": got.peak, "analytic": got.analytic.total, "peer": peer and peer * GIB})
        if got.peak > (peer * GIB if peer else got.target.chip.memory) or abs(got.analytic.total / got.peak - 1) > 0.1:
            wrong.append(name)
    if out:
        out.write_text(json.dumps(rows, indent=1))
    if check and wrong:
        sys.exit(f"more than the peer, or the analytic model is off by more than a tenth: {', '.join(wrong)}")


def remat_table() -> None:
    print("| remat | peak GiB | kept for the backward pass, GiB | compiled FLOPs / the model's |")
    print("|---|---|---|---|")
    for remat in (*nn.POLICIES, None):
        got = plan.plan("llama3.1-8b", "v5p-16", sequence=4096, remat=remat)
        flops = got.costs.flops * got.target.devices / got.model_flops if got.costs else float("nan")
        print(f"| {remat} | {got.peak / GIB:.2f} | {got.analytic.activations / GIB:.2f} | {flops:.2f} |", flush=True)


if __name__ == "__main__":
    main()
