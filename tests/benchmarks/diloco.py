"""Trains a small Llama with data parallelism and with DiLoCo on the same tokens of real text.

    python -m tests.benchmarks.diloco [--replicas 4 --every 10 --steps 300 --warm-up 0.25] [--json out.json]

Both share the first steps (`--warm-up`, a share of all), as in the paper (arXiv:2311.08105), where a model is trained
with data parallelism before the replicas part; a batch has `--batch` rows of each replica. Prints the validation loss
of each, and its difference from data parallelism.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import optax

from maxlib import training
from tests.benchmarks.quantization import batches, builders


def optimizers(args: argparse.Namespace) -> dict[str, optax.GradientTransformation]:
    """The outer optimizers by name."""
    default = training.DiLoCo(replicas=1, every=1).outer
    return {"Nesterov": default, "mean": optax.sgd(1.0), "gentle": optax.sgd(0.7, momentum=0.5, nesterov=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 300, "batch": 8, "length": 128, "vocab": 1024, "layers": 2, "dim": 128, "seed": 0}
    for name, default in (sizes | {"replicas": 4, "every": 10}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=float, default=0.25)
    parser.add_argument("--outer", nargs="+", default=["Nesterov", "mean"], help="outer optimizers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.batch, args.experts = args.replicas * args.batch, 0
    train, held_out = batches(args)
    parts = round(args.warm_up * args.steps)

    loss = training.NextToken()
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    start = jax.jit(builders(args)["llama"])()
    optimizer = training.adamw(schedule, mask=training.decay_mask(start))
    step = training.make_train_step(loss, optimizer, dtype="float32", router_bias_update_rate=0)
    judge = jax.jit(training.make_eval_step(loss, dtype="float32"))
    alone = training.jit_step(step)
    results: dict[str, Any] = {}

    def judged(name: str, state: Any) -> None:
        results[name] = float(training.evaluate(judge, state, held_out)["nll"])
        change = results[name] / results.get("data parallelism", results[name]) - 1
        print(f"{name:40}{results[name]:8.4f}{change:+8.2%}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(vars(args) | {"results": results}, indent=2, default=str))

    state = training.make_state(start, optimizer)
    for batch in train[:parts]:
        state, _ = alone(state, batch)
    judged("where the replicas part", state)
    replicas = jax.tree.map(lambda x: x.copy(), state)
    for batch in train[parts:]:
        state, _ = alone(state, batch)
    judged("data parallelism", state)
    for name in args.outer:
        diloco = training.DiLoCo(replicas=args.replicas, every=args.every, outer=optimizers(args)[name])
        every, state = diloco.wrap(step), diloco.init(replicas)
        for batch in train[parts:]:
            state, _ = every(state, batch)
        judged(f"DiLoCo, {name}, every {args.every} steps", state)


if __name__ == "__main__":
    main()
