"""Training steps of every preset, compiled for TPUs that are not there: arithmetic, memory and speed at the roofline.

    python -m tests.benchmarks.sweep [NAME ...] [--targets v5p v6e] [--share 0/4] [--json out.json] [--check]

Needs libtpu (`pip install "maxlib[tpu]"`), no TPU. 4096 tokens (fewer if the model takes fewer), one sequence a chip,
full remat, FSDP over the smallest slice on which the analytic model fits. Presets of the same sizes are compiled once.
--share i/n takes every n-th preset from the i-th. --check ends with an error if a step computes more than 1.45 times
the model's FLOPs, does not fit, or has less than 60% MFU at the roofline and no reason in `SLOW`.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from maxlib import nn, plan, weights
from tests.benchmarks.plans import AGAIN, GIB, again
from tests.plan.jobs import layout

SEQUENCE, LEAST_MFU, FULL_SLICE = 4096, 0.6, 0.9  # of a chip's memory
SIZES = {"v5p": [8 * 2**i for i in range(9)], "v6e": [4 * 2**i for i in range(7)], "v5e": [4 * 2**i for i in range(7)]}
EXPERTS = "one sequence is few tokens for all experts' weights, which FSDP gathers to every chip"
# Why a preset's step is slower than 60% of the peak at the roofline; of experts it is the above.
SLOW = {
    "gpt3-52k": "a toy, narrower than a tile",
    "qwen3.5-0.8b": "the chunks of the gated delta rule pass through memory",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--targets", nargs="+", default=["v5p", "v6e"], choices=SIZES)
    parser.add_argument("--share", default="0/1", metavar="I/N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print('skipped: plans for TPUs need libtpu, pip install "maxlib[tpu]"')
        return
    first, of = map(int, args.share.split("/"))
    rows = []
    print("| preset, target | parameters | peak GiB | FLOPs, times the model's | MFU | bound by | compile s |")
    print("|---" * 7 + "|")
    for name in (args.names or distinct())[first::of]:
        for chip in args.targets:
            rows.append(row(name, chip))
            print(shown(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if wrong := [f"{one['preset']} on {one['target']}: {why}" for one in rows for why in faults(one)]:
        print(*wrong, sep="\n")
        sys.exit(1 if args.check else 0)


def distinct() -> list[str]:
    """Returns one preset of each group with the same configuration."""
    found: dict[Any, str] = {}
    for name, cfg in weights.presets().items():
        found.setdefault(cfg, name)
    return list(found.values())


def row(name: str, chip: str) -> dict[str, Any]:
    """Returns what the compiler and the roofline say of a preset on the smallest slice that fits; or why there is
    none.
    """
    try:
        job = fitting(name, chip)
        got = plan.plan(job)
    except Exception as error:  # one that cannot be planned must not end the sweep
        return {"preset": name, "target": chip, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    assert got.costs and got.estimate, "the program's text could not be read"
    guess = got.estimate
    times = {"arithmetic": guess.compute, "memory": guess.memory, "network": guess.network}
    return {
        "preset": name,
        "target": job.target,
        "parameters": got.num_parameters,
        "peak": got.peak,
        "fits": got.fits,
        "factor": 1 + again(got),
        "mfu": guess.mfu,
        "bound": max(times, key=times.__getitem__),
        "slow_because": EXPERTS if is_sparse(name) else SLOW.get(name),
        "compile_seconds": got.compile_seconds,
    }


def is_sparse(name: str) -> bool:
    """Whether a preset has experts: not all of its parameters take part in each token."""
    cfg = weights.presets()[name]
    family = next(one for one in weights.families() if name in one.presets)
    model = jax.eval_shape(lambda: family.model(cfg, rngs=nnx.Rngs(0)))
    return nn.describe.num_active_parameters(model) < 0.9 * nn.num_parameters(model)


def fitting(name: str, chip: str) -> plan.Job:
    """Returns the preset's job on the smallest slice of a kind of chip on which the analytic model fits.

    Raises ValueError with the last reason if there is none.
    """
    why = "no slice is large enough"
    for sequence in (SEQUENCE, SEQUENCE // 2, SEQUENCE // 4):  # as many tokens as the model has positions for
        job = plan.Job(name, chip, layout=layout("fsdp"), sequence=sequence, remat="full")
        for size in SIZES[chip]:
            one = dataclasses.replace(job, target=f"{chip}-{size}")
            try:
                got = plan.estimated(one)
            except ValueError as error:
                why = str(error)
                break
            if got.peak < FULL_SLICE * got.target.chip.memory:
                return one
    raise ValueError(why)


def shown(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"| {one['preset']}, {one['target']} | {one['error']} |"
    values = [
        f"{one['parameters'] / 1e9:.2f}B",
        f"{one['peak'] / GIB:.2f}",
        f"{one['factor']:.2f}",
        f"{one['mfu']:.1%}",
    ]
    return (
        f"| {one['preset']}, {one['target']} | {' | '.join(values)} | {one['bound']} | {one['compile_seconds']:.0f} |"
    )


def faults(one: dict[str, Any]) -> list[str]:
    """What a row falls short of."""
    if "error" in one:
        return [one["error"]]
    wrong = [] if one["fits"] else [f"needs {one['peak'] / GIB:.2f} GiB"]
    wrong += [f"{one['factor']:.2f} times the model's FLOPs"] if one["factor"] > 1 + AGAIN else []
    slow = one["mfu"] < LEAST_MFU and not one["slow_because"]
    wrong += [f"{one['mfu']:.1%} MFU at the roofline"] if slow else []
    return wrong


if __name__ == "__main__":
    main()
