"""Forward plus backward of a dropless mixture of experts against a dense MLP of the active size, and of the grouped
matmul against a Python loop of dense matmuls over the same rows.

    python -m tests.benchmarks.moe [--tokens 2048 --dim 512 --mlp-dim 1024 --experts 8 --top-k 2]

The loop's row counts are constants of its program and its weights are separate arrays: the best that XLA can do, but
compiled anew for each routing.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, ops
from tests.benchmarks.timing import both_passes, compiled, measure, show


def layers(args):
    """MoE layers, and a dense one with the same multiplications per token (routing apart)."""
    x = jax.random.normal(jax.random.key(0), (args.batch, args.tokens // args.batch, args.dim), args.dtype)

    def mixture():
        router = nn.Router(args.dim, args.experts, top_k=args.top_k, rngs=nnx.Rngs(1))
        return nn.MoE(args.dim, args.mlp_dim, router=router, rngs=nnx.Rngs(0))

    dense = jax.jit(lambda: nn.GatedMLP(args.dim, args.top_k * args.mlp_dim, rngs=nnx.Rngs(0)))()
    values, rest = nn.partition(jax.jit(mixture)())
    return {
        "dense MLP": compiled(both_passes(lambda m, x: m(x)), dense, x),
        "MoE dropless": compiled(both_passes(lambda v, x: nn.combine(v, rest)(x)[0]), values, x),
    }


def matmuls(args):
    rows, rng = args.tokens * args.top_k, np.random.default_rng(0)
    # Some experts have several times the rows of others.
    counts = rng.multinomial(rows, rng.dirichlet(np.full(args.experts, 4.0)))
    x = jnp.asarray(rng.normal(size=(rows, args.dim)), args.dtype)
    w = jnp.asarray(rng.normal(size=(args.experts, args.mlp_dim, args.dim)), args.dtype)
    parts = [jnp.asarray(part) for part in np.split(np.asarray(x), np.cumsum(counts)[:-1])]

    def loop(parts, weights):
        return [part @ w.T for part, w in zip(parts, weights, strict=True)]

    return {
        "loop of matmuls": compiled(both_passes(loop), parts, list(w)),
        "grouped_matmul": compiled(both_passes(lambda x, w: ops.grouped_matmul(x, w, jnp.asarray(counts))), x, w),
        "one dense matmul": compiled(both_passes(lambda x, w: x @ w.T), x, w[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 2048, "batch": 4, "dim": 512, "mlp-dim": 1024, "experts": 8, "top-k": 2, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    for title, programs in (("layer", layers(args)), ("matmul", matmuls(args))):
        times = measure({name: run for name, (run, _) in programs.items()}, args.rounds)
        memory = {name: mib for name, (_, mib) in programs.items()}
        show(f"{title}, forward + backward", times, next(iter(times)), memory)


if __name__ == "__main__":
    main()
