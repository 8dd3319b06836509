"""Trains the main job, README's first command, with data parallelism and with DiLoCo on the same tokens of real text.

    python -m tests.benchmarks.diloco [--replicas 4 --every 10 --warm-up 0.25] [--routes default moments] [--json FILE]

All have the same batches, and share the first steps (`--warm-up`, a share of all), as in the paper (arXiv:2311.08105),
where a model is trained with data parallelism before the replicas part; each replica has an equal part of a batch's
`--batch` rows. Prints the validation loss of each at `--judged` places, and its difference from data parallelism there.
`--layers 2 --dim 128` is a quick model on the same tokens.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlib import training
from tests.benchmarks.quantization import batches, builders


@dataclasses.dataclass(frozen=True)
class Route:
    """How a model is trained after the shared steps.

    Attributes:
        settings: Settings of DiLoCo; None for data parallelism.
        rate: Factor of the learning rate.
        b2: AdamW's decay of the mean squared gradient.
    """

    settings: dict[str, Any] | None = None
    rate: float = 1.0
    b2: float = 0.95


MEAN = {"outer": optax.sgd(1.0)}
MOMENTS = {"outer": optax.sgd(1.0), "average_moments": True}
ROUTES = {
    "data-parallel": Route(),
    "data-parallel-x2": Route(rate=2.0),
    "data-parallel-slow": Route(b2=0.99),
    "default": Route({}),
    "mean": Route(MEAN),
    "mean-x2": Route(MEAN, 2.0),
    "moments": Route(MOMENTS),
    "moments-x2": Route(MOMENTS, 2.0),
    "moments-x2-slow": Route(MOMENTS, 2.0, b2=0.99),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 360, "batch": 4, "length": 256, "vocab": 4096, "layers": 4, "dim": 448, "seed": 0}
    for name, default in (sizes | {"replicas": 4, "every": 10, "judged": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=float, default=0.25)
    parser.add_argument("--routes", nargs="+", default=["moments-x2-slow", "default"], choices=list(ROUTES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.experts = 0
    train, held_out = batches(args)
    parts = round(args.warm_up * args.steps)
    places = [parts + (args.steps - parts) * (i + 1) // args.judged for i in range(args.judged)]

    loss = training.NextToken()
    start = jax.jit(builders(args)["llama"])()
    cosine = training.warmup_cosine(args.learning_rate, args.steps, warmup=max(args.steps // 10, 1))
    judge = jax.jit(training.make_eval_step(loss, dtype="float32"))
    results: dict[str, dict[int, float]] = {}

    def optimizer_of(route: Route) -> optax.GradientTransformation:
        def schedule(step: Any) -> Any:
            return cosine(step) * jnp.where(step < parts, 1.0, route.rate)

        return training.adamw(schedule, mask=training.decay_mask(start), b2=route.b2)

    def step_of(route: Route) -> Any:
        return training.make_train_step(loss, optimizer_of(route), dtype="float32", router_bias_update_rate=0)

    state = training.make_state(start, optimizer_of(Route()))
    shared = training.jit_step(step_of(Route()))
    for batch in train[:parts]:
        state, _ = shared(state, batch)
    for name in dict.fromkeys(["data-parallel", *args.routes]):
        route, results[name] = ROUTES[name], {}
        trained = jax.tree.map(lambda x: x.copy(), state)
        if route.settings is None:
            step = training.jit_step(step_of(route))
        else:
            diloco = training.DiLoCo(replicas=args.replicas, every=args.every, **route.settings)
            step, trained = diloco.wrap(step_of(route)), diloco.init(trained)
        for number, batch in enumerate(train[parts:], parts + 1):
            trained, _ = step(trained, batch)
            if number in places:
                nll = float(training.evaluate(judge, trained, held_out)["nll"])
                results[name][number] = nll
                gap = nll / results["data-parallel"][number] - 1
                print(f"{name:20}{number:6} steps{nll:9.4f}{gap:+9.2%}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(vars(args) | {"results": results}, indent=2, default=str))


if __name__ == "__main__":
    main()
