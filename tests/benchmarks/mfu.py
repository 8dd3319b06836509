"""A whole training step on one device: tokens per second, MFU and memory of models and slices of models, in bfloat16
and in fewer bits, beside those of a plan for the same device.

    python -m tests.benchmarks.mfu [--cases 1b 8b-slice] [--formats full fp8 fp8_block] [--remats full none]
        [--steps 10] [--json out.jsonl]
    python -m tests.benchmarks.mfu --tiny   # the same code at a small size, also on a CPU

`1b` is Llama3.2-1B; `8b-slice` is four layers of Llama3.1-8B with its embedding and head, `moe-slice` four of
Qwen3-30B-A3B; `hybrid` is Qwen3.5-0.8B. AdamW, one row of 4,096 tokens a step unless `--batch` and `--length` say else.
Memory is what XLA allocates for the step. MFU is the model's FLOPs, without recomputation, by the
device's bfloat16 peak, in every format. A loss that is not a number, or does not fall, is an error, and a case that
fails or does not fit is a line with the reason. Each result is a line of JSON as soon as it is there.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import hardware, observability, plan, training
from maxlib.models import llama, qwen3_5, qwen3_moe
from tests.benchmarks.attention_gpu import Lines, attempt

CASES = {
    "1b": llama.PRESETS["llama3.2-1b"],
    "8b-slice": dataclasses.replace(llama.PRESETS["llama3.1-8b"], num_layers=4),
    "moe-slice": dataclasses.replace(qwen3_moe.PRESETS["qwen3-30b-a3b"], num_layers=4),
    "hybrid": qwen3_5.PRESETS["qwen3.5-0.8b"],
}
TINY = dict(vocab=512, num_layers=2, dim=128, mlp_dim=256, num_heads=4, num_kv_heads=2, head_dim=64)


def target_of(device_kind: str) -> str | None:
    """Returns the name under which plans know one device of this kind."""
    chip = hardware.chip_of(device_kind)
    name = next((name for name, known in hardware.CHIPS.items() if known is chip), None)
    if chip is None or name is None or name == "cpu":
        return "cpu" if jax.default_backend() == "cpu" else None
    return f"{name}-{chip.cores}" if chip.kind.startswith("TPU") else name


def planned(job: plan.Job) -> dict[str, float]:
    """Returns the prediction of a plan from shapes."""
    estimate = plan.estimated(job)
    return {"gib": estimate.peak / 2**30} | (
        {} if estimate.estimate is None else {"ms": 1e3 * estimate.estimate.seconds, "mfu": estimate.estimate.mfu}
    )


def measure(job: plan.Job, steps: int, unstacked: bool) -> dict[str, Any]:
    """Trains for a few steps and times them; they are waited for once."""
    model = jax.jit(job.build)()
    if unstacked:
        model.layers = model.layers.unstacked()
    optimizer = training.adamw(1e-3, mask=training.decay_mask(model))
    shape = (int(job.per_device_batch_size), job.sequence + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, job.model.vocab)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    flops = observability.training_flops(training.NextToken(), model, batch)
    state = training.make_state(model, optimizer)
    del model
    step = training.make_train_step(training.NextToken(), optimizer, dtype=jnp.bfloat16, remat=job.remat)
    step = training.jit_step(step).lower(state, batch).compile()
    state, metrics = step(state, batch)
    first = float(metrics["nll"])
    begin = time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, batch)
    last = float(metrics["nll"])
    seconds = (time.perf_counter() - begin) / steps
    if not (math.isfinite(last) and last < first):
        raise ValueError(f"the loss went from {first} to {last} on one batch")
    peak = observability.peak_flops()
    mfu = {} if peak is None else {"mfu": flops / seconds / (peak / jax.device_count())}
    return {
        "ms": 1e3 * seconds,
        "tokens_per_second": tokens[:, 1:].size / seconds,
        "gib": memory(step) / 2**30,
        "loss": [first, last],
    } | mfu


def memory(step: Any) -> int:
    """Returns the bytes that XLA allocates for a compiled step, arguments and results included."""
    sizes = step.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes  # what does not take an argument's place
    return sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--formats", nargs="+", default=["full", "fp8", "fp8_block"])
    parser.add_argument("--remats", nargs="+", default=["full"], help="`remat` of the model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many minutes")
    parser.add_argument("--unstacked", action="store_true", help="store layers one by one instead of scanning them")
    parser.add_argument("--tiny", action="store_true", help="one small model, also on a CPU")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    if jax.default_backend() == "cpu" and not args.tiny:
        print("Nothing measured: this needs an accelerator; --tiny runs the same code on a CPU.")
        return
    cases = {name: CASES[name] for name in args.cases}
    if args.tiny:
        cases, args.length, args.steps = {"tiny": dataclasses.replace(CASES["1b"], **TINY)}, 128, 3
    lines, begin, target = Lines(args.json, tiny=args.tiny), time.monotonic(), target_of(jax.devices()[0].device_kind)
    for (name, cfg), format, remat in itertools.product(cases.items(), args.formats, args.remats):
        row = {"case": name, "format": format, "remat": remat, "batch": args.batch, "length": args.length}
        row["unstacked"] = args.unstacked
        if time.monotonic() - begin > 60 * args.minutes:
            lines.add(row | {"left_out": f"{args.minutes:g} minutes are over"})
            continue
        job = plan.Job(
            cfg,
            target or "h100",  # plans do not know this device: only the model of the job is used
            quantization=None if format == "full" else format,
            remat=None if remat == "none" else remat,
            per_device_batch_size=args.batch,
            sequence=args.length,
        )
        result = attempt(functools.partial(measure, job, args.steps, args.unstacked))
        lines.add(row | ({"left_out": result} if isinstance(result, str) else result))
        jax.clear_caches()
        lines.add(row | {"plan": attempt(functools.partial(planned, job)) if target else "no plan for this device"})


if __name__ == "__main__":
    main()
