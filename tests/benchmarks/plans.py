"""Memory and collectives of training steps on TPUs that are not there, beside MaxText's own ahead-of-time compile.

    python -m tests.benchmarks.plans [NAME ...] [--json out.json]

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU. float32 parameters and Adam moments, bfloat16 arithmetic, pure FSDP, full remat,
scanned layers, one sequence per chip. The peer's figures: commit e591f30, libtpu 0.0.51, flash kernel, the same settings.
"""

import argparse
import importlib.util
import json
from pathlib import Path

from maxlib import plan

# preset, target, sequence: the peer's peak GiB
CASES = {
    "llama2-7b": ("llama2-7b", "v5p-8", 2048, 29.04),
    "llama3.1-8b": ("llama3.1-8b", "v5e-16", 2048, 9.32),
    "mixtral-8x7b": ("mixtral-8x7b", "v5p-128", 4096, 17.50),
    "llama2-70b": ("llama2-70b", "v5p-128", 4096, 25.87),
    "llama3.1-405b": ("llama3.1-405b", "v5p-512", 8192, 71.82),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
        return
    rows = []
    print("| model, target | sequence | peak GiB | analytic | peer | collectives | lower s | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.names or CASES:
        preset, target, sequence, peer = CASES[name]
        try:
            got = plan.plan(preset, target, sequence=sequence)
        except ValueError as error:  # a family that is not there yet
            print(f"| {name}, {target} | {sequence} | {error} |")
            continue
        gib = 2**30
        kinds = (
            " / ".join(f"{one.written} {one.kind}" for one in got.costs.collectives) if got.costs else "not readable"
        )
        row = [f"{got.peak / gib:.2f}", f"{got.analytic.total / gib:.2f}", f"{peer:.2f}", kinds]
        row += [f"{got.lower_seconds:.1f}", f"{got.compile_seconds:.0f}"]
        print(f"| {name}, {target} | {sequence} | {' | '.join(row)} |", flush=True)
        rows.append(
            {
                "name": name,
                "peak": got.peak,
                "analytic": got.analytic.total,
                "peer": peer * gib,
                "seconds": got.compile_seconds,
            }
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
