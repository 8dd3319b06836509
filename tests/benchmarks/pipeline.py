"""Pipelines: temporary memory by the number of microbatches, as the compiler plans it, and the share of idle ticks.

    python -m tests.benchmarks.pipeline [--stages 4 --dim 256]

The batch grows with its microbatches, whose size stays. Pretended devices on a CPU: memory is exact, times would mean
nothing.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlib import ops, sharding, training
from maxlib.models import llama


def temporary(args: argparse.Namespace, microbatches: int, one_f_one_b: bool) -> float:
    """MiB per device of one training step beside its arguments."""
    heads = args.dim // 64
    size = {"num_layers": 2 * args.stages, "dim": args.dim, "mlp_dim": 2 * args.dim, "num_heads": heads}
    cfg = llama.Config(vocab=1024, num_kv_heads=heads, head_dim=64, rope=ops.Rope(64), **size)
    rules = sharding.DP | {"layers": sharding.Pipeline("stage", microbatches)}
    mesh = sharding.make_mesh(stage=args.stages, devices=jax.devices()[: args.stages])
    model = sharding.create(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), mesh, rules)
    optimizer, options = optax.sgd(1e-3), {"dtype": jnp.float32, "remat": "full"}
    loss = lambda model, batch, key: training.next_token_loss(model, batch, key, **options)
    gradients = training.one_f_one_b(**options) if one_f_one_b else None
    batch = {name: jnp.zeros((2 * microbatches, 512), jnp.int32) for name in ("tokens", "targets")}
    with sharding.use(mesh, rules):
        state = training.make_state(model, optimizer)
        step = training.jit_step(training.make_train_step(loss, optimizer, gradients=gradients))
        return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    args = parser.parse_args()
    print(f"{args.stages} stages, temporary MiB per device\nmicrobatches  idle   GPipe    1F1B")
    for microbatches in (4, 8, 16, 32):
        idle = (args.stages - 1) / (microbatches + args.stages - 1)
        plain, interleaved = (temporary(args, microbatches, kind) for kind in (False, True))
        print(f"{microbatches:12}  {idle:4.0%}  {plain:6.1f}  {interleaved:6.1f}", flush=True)


if __name__ == "__main__":
    main()
