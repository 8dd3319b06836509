"""A whole training step on one device: tokens per second and MFU of 1B- and 8B-shaped Llamas, in bfloat16 and in fewer
bits, with the roofline of a plan for the same device beside it.

    python -m tests.benchmarks.mfu [--cases 1b 8b-slice] [--formats full fp8 fp8_block] [--steps 10] [--json out.jsonl]
    python -m tests.benchmarks.mfu --tiny   # the same code at a small size, also on a CPU

`1b` is Llama3.2-1B, `8b-slice` four layers of Llama3.1-8B with its embedding and head; AdamW, full remat, one row of
4,096 tokens a step unless `--batch` and `--length` say else. MFU is the model's FLOPs, without recomputation, by the
device's bfloat16 peak, in every format. A loss that is not a number, or does not fall, is an error, and a case that
fails or does not fit is a line with the reason. Each result is a line of JSON as soon as it is there.
"""

import argparse
import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import hardware, observability, plan, quantization, training
from maxlib.models import llama
from tests.benchmarks.attention_gpu import Lines, attempt

EIGHT = llama.PRESETS["llama3.1-8b"]
CASES = {"1b": llama.PRESETS["llama3.2-1b"], "8b-slice": dataclasses.replace(EIGHT, num_layers=4)}
TINY = dict(vocab=512, num_layers=2, dim=128, mlp_dim=256, num_heads=4, num_kv_heads=2, head_dim=64)


def target_of(device_kind: str) -> str | None:
    """Returns the name under which plans know one device of this kind."""
    chip = hardware.chip_of(device_kind)
    name = next((name for name, one in hardware.CHIPS.items() if one is chip), None)
    if chip is None or name is None or name == "cpu":
        return "cpu" if jax.default_backend() == "cpu" else None
    return f"{name}-{chip.cores}" if chip.kind.startswith("TPU") else name


def roofline(cfg: Any, format: str, args: argparse.Namespace) -> dict[str, float] | str:
    """Returns the prediction of a plan from shapes for this device, or the reason why there is none."""
    target = target_of(jax.devices()[0].device_kind)
    if target is None:
        return "plans do not know this device"
    options = {"per_device_batch_size": args.batch, "sequence": args.length}
    job = plan.Job(cfg, target, quantization=None if format == "full" else format, **options)
    found = plan.estimated(job).estimate
    return "no estimate" if found is None else {"seconds": found.seconds, "mfu": found.mfu}


def measure(cfg: Any, format: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains for a few steps and times them; they are waited for once."""
    build = lambda: llama.Llama(cfg, rngs=nnx.Rngs(0))
    model = jax.jit(build if format == "full" else lambda: quantization.for_training(build(), format))()
    loss = functools.partial(training.next_token_loss, dtype=jnp.bfloat16, remat="full")
    optimizer = training.adamw(1e-3, mask=training.decay_mask(model))
    tokens = jax.random.randint(jax.random.key(1), (args.batch, args.length + 1), 0, cfg.vocab)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    flops = observability.training_flops(loss, model, batch)
    state, step = training.make_state(model, optimizer), training.jit_step(training.make_train_step(loss, optimizer))
    del model
    state, metrics = step(state, batch)
    first = float(metrics["nll"])
    begin = time.perf_counter()
    for _ in range(args.steps):
        state, metrics = step(state, batch)
    last = float(metrics["nll"])
    seconds = (time.perf_counter() - begin) / args.steps
    if not (math.isfinite(last) and last < first):
        raise ValueError(f"the loss went from {first} to {last} on one batch")
    peak = observability.peak_flops()
    mfu = {} if peak is None else {"mfu": flops / seconds / (peak / jax.device_count())}
    return {"ms": 1e3 * seconds, "tokens_per_second": tokens[:, 1:].size / seconds, "loss": [first, last]} | mfu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--formats", nargs="+", default=["full", "fp8", "fp8_block"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many minutes")
    parser.add_argument("--tiny", action="store_true", help="one small model, also on a CPU")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    if jax.default_backend() == "cpu" and not args.tiny:
        print("Nothing measured: this needs an accelerator; --tiny runs the same code on a CPU.")
        return
    cases = {name: CASES[name] for name in args.cases}
    if args.tiny:
        cases, args.length, args.steps = {"tiny": dataclasses.replace(CASES["1b"], **TINY)}, 128, 3
    lines, begin = Lines(args.json, tiny=args.tiny), time.monotonic()
    for name, cfg in cases.items():
        for format in args.formats:
            row = {"case": name, "format": format, "batch": args.batch, "length": args.length}
            late = time.monotonic() - begin > 60 * args.minutes
            found = (
                f"{args.minutes:g} minutes are over" if late else attempt(functools.partial(measure, cfg, format, args))
            )
            lines.add(row | ({"left_out": found} if isinstance(found, str) else found))
            jax.clear_caches()
            lines.add(row | {"plan": attempt(functools.partial(roofline, cfg, format, args))})


if __name__ == "__main__":
    main()
