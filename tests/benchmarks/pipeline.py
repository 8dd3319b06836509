"""Pipelines: the share of idle ticks, what that costs in the compiled program, and temporary memory as the compiler
plans it, by the numbers of microbatches and repeats.

    python -m tests.benchmarks.pipeline [--stages 4 --layers 16 --dim 256]

The batch grows with its microbatches, whose size stays. Pretended devices on a CPU: memory and arithmetic are exact,
times would mean nothing.
"""

import argparse
import os

# Memory and arithmetic are planned before LLVM, which need not take its time.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlib import ops, sharding, training
from maxlib.models import llama
from maxlib.plan._hlo import Costs, read_costs


def build(args: argparse.Namespace) -> llama.Llama:
    heads = args.dim // 64
    size = {"num_layers": args.layers, "dim": args.dim, "mlp_dim": 2 * args.dim, "num_heads": heads}
    cfg = llama.Config(vocab=64, num_kv_heads=heads, head_dim=64, rope=ops.Rope(64), **size)
    return llama.Llama(cfg, rngs=nnx.Rngs(0))


def step(args: argparse.Namespace, pipeline: sharding.Pipeline, stages: int = 0) -> tuple[float, Costs]:
    """MiB per device of one training step beside its arguments, and what a device does in it."""
    stages = stages or args.stages
    rules, mesh = sharding.DP | pipeline, sharding.make_mesh(stage=stages, devices=jax.devices()[:stages])
    layout = sharding.Layout(mesh, rules)
    model, optimizer = sharding.create(lambda: build(args), layout), optax.sgd(1e-3)
    batch = {name: jnp.zeros((2 * pipeline.microbatches, 512), jnp.int32) for name in ("tokens", "targets")}
    with sharding.use(layout):
        state = training.make_state(model, optimizer)
        run = training.jit_step(
            training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32, remat="full")
        )
        program = run.lower(state, batch).compile()
    costs = read_costs(program.as_text(), dict(mesh.shape))
    return program.memory_analysis().temp_size_in_bytes / 2**20, costs


def row(args: argparse.Namespace, microbatches: int, repeats: int, alone: float) -> str:
    ticks = microbatches * repeats + args.stages - 1
    gpipe, costs = step(args, sharding.Pipeline("stage", microbatches, repeats))
    early, _ = step(args, sharding.Pipeline("stage", microbatches, repeats, "1f1b"))
    work = args.stages * costs.flops / (alone * microbatches)
    moved = {kind: sum(one.bytes for one in costs.collectives if one.kind == kind) for kind in KINDS}
    travels = "  ".join(f"{moved[kind] / 2**20:6.1f}" for kind in KINDS)
    idle = (args.stages - 1) / ticks
    return f"{microbatches:12}  {repeats:7}  {ticks:5}  {idle:4.0%}  {work:5.2f}  {gpipe:6.1f}  {early:6.1f}  {travels}"


KINDS = ("all-to-all", "collective-permute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--microbatches", type=int, nargs="+", default=(8, 16, 32))
    parser.add_argument("--repeats", type=int, nargs="+", default=(1, 2, 4))
    args = parser.parse_args()
    alone = step(args, sharding.Pipeline("stage", 1), stages=1)[1].flops
    print(
        f"{args.layers} layers on {args.stages} stages. work: arithmetic of all devices over that of one that is alone; "
        f"GPipe, 1F1B: temporary MiB per device; GPipe's {' and '.join(KINDS)}, MiB\n"
        "microbatches  repeats  ticks  idle   work   GPipe    1F1B  to-all  permute"
    )
    for microbatches in args.microbatches:
        for repeats in args.repeats:
            print(row(args, microbatches, repeats, alone), flush=True)


if __name__ == "__main__":
    main()
