"""Trains the main job, README's first command, with data parallelism and with DiLoCo on the same tokens of real text.

    python -m tests.benchmarks.diloco [--replicas 4 --every 10 --warm-up 0.25] [--routes mean moments] [--json out.json]

Both have the same batches, optimizer and schedule, and share the first steps (`--warm-up`, a share of all), as in the
paper (arXiv:2311.08105), where a model is trained with data parallelism before the replicas part; each replica has an
equal part of a batch's `--batch` rows. Prints the validation loss of each at `--judged` places, and its difference from
data parallelism there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import optax

from maxlib import training
from tests.benchmarks.quantization import batches, builders

# Settings of DiLoCo by name.
ROUTES: dict[str, dict[str, Any]] = {
    "default": {},
    "mean": {"outer": optax.sgd(1.0)},
    "double": {"outer": optax.sgd(2.0)},
    "moments": {"outer": optax.sgd(1.0), "average_moments": True},
    "moments-double": {"outer": optax.sgd(2.0), "average_moments": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 360, "batch": 4, "length": 256, "vocab": 4096, "layers": 4, "dim": 448, "seed": 0}
    for name, default in (sizes | {"replicas": 4, "every": 10, "judged": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=float, default=0.25)
    parser.add_argument("--routes", nargs="+", default=["default", "moments-double"], choices=list(ROUTES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.experts = 0
    train, held_out = batches(args)
    parts = round(args.warm_up * args.steps)
    places = [parts + (args.steps - parts) * (i + 1) // args.judged for i in range(args.judged)]

    loss = training.NextToken()
    schedule = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    start = jax.jit(builders(args)["llama"])()
    optimizer = training.adamw(schedule, mask=training.decay_mask(start))
    step = training.make_train_step(loss, optimizer, dtype="float32", router_bias_update_rate=0)
    judge = jax.jit(training.make_eval_step(loss, dtype="float32"))
    alone = training.jit_step(step)
    results: dict[str, dict[int, float]] = {}

    def follow(name: str, step: Any, state: Any) -> None:
        """Trains from where the replicas part, and judges at each place."""
        results[name] = {}
        for number, batch in enumerate(train[parts:], parts + 1):
            state, _ = step(state, batch)
            if number in places:
                nll = float(training.evaluate(judge, state, held_out)["nll"])
                results[name][number] = nll
                gap = nll / results["data parallelism"][number] - 1
                print(f"{name:40}{number:6} steps {nll:8.4f} {gap:+8.2%}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(vars(args) | {"results": results}, indent=2, default=str))

    state = training.make_state(start, optimizer)
    for batch in train[:parts]:
        state, _ = alone(state, batch)
    replicas = jax.tree.map(lambda x: x.copy(), state)
    follow("data parallelism", alone, state)
    for route in args.routes:
        diloco = training.DiLoCo(replicas=args.replicas, every=args.every, **ROUTES[route])
        follow(f"DiLoCo, {route}, every {args.every} steps", diloco.wrap(step), diloco.init(replicas))


if __name__ == "__main__":
    main()
