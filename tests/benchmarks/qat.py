"""How much of the loss of int4 weights quantization-aware training recovers, on the job of `quantization.py`.

    python -m tests.benchmarks.qat [--seeds 0 1 2] [--layers 2 --dim 192] [--group 32]

A small Llama trains for two thirds of the steps. The rest is trained twice from there, on the same batches: in full
precision, and with weights rounded to int4. Prints the validation loss in full precision, that of the first run with
weights rounded to nearest, and that of the second with its weights stored in int4. A group of 0 has one scale for each
output.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from maxlib import nn, quantization, training
from tests.benchmarks.quantization import batches, builders


def judged(model, held_out, dtype) -> float:
    state = training.make_state(model, training.adamw(1e-3))
    step = jax.jit(training.make_eval_step(training.NextToken(), dtype=dtype))
    return float(training.evaluate(step, state, held_out)["nll"])


def run(args, train, held_out):
    format, dtype = quantization.Format("int4", group=args.group or None), jnp.dtype(args.dtype)
    start = jax.jit(builders(args)["llama"])()
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    optimizer = training.adamw(schedule, mask=training.decay_mask(start))
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=dtype))
    state = training.make_state(start, optimizer)
    change = args.steps * 2 // 3
    for batch in train[:change]:
        state, _ = step(state, batch)
    aware = quantization.for_training(nn.combine(state.trainable, state.rest), format)
    aware = dataclasses.replace(jax.tree.map(jnp.copy, state), rest=nn.partition(aware, nn.tree.is_trainable)[1])

    def finished(state):
        for batch in train[change:]:
            state, _ = step(state, batch)
        return quantization.full_precision(nn.combine(state.trainable, state.rest))

    plain, aware = finished(state), finished(aware)
    store = jax.jit(lambda m: quantization.full_precision(quantization.for_inference(m, format)))
    return [judged(model, held_out, dtype) for model in (plain, store(plain), store(aware))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 300, "batch": 8, "length": 128, "vocab": 1024, "layers": 2, "dim": 192, "group": 32, "experts": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    train, held_out = batches(args)
    for seed in args.seeds:
        args.seed = seed
        full, nearest, aware = run(args, train, held_out)
        recovered = (nearest - aware) / (nearest - full)
        print(
            f"seed {seed}: {full:.4f}, to nearest {nearest / full - 1:+.2%}, QAT {aware / full - 1:+.2%}: {recovered:.0%} recovered"
        )


if __name__ == "__main__":
    main()
