"""Grouped matmul on one NVIDIA GPU: TFLOP/s of maxlib's kernels and XLA against the dense matmul of the same useful
size, in one run.

    python -m tests.benchmarks.grouped_matmul_gpu [--rounds 10] [--minutes 9] [--json out.jsonl]
    python -m tests.benchmarks.grouped_matmul_gpu --tiny   # the same code at small sizes, also on a CPU

8,192 rows, 16 experts of 4096 x 2048, and 65,536 rows, 128 experts of 2048 x 768, bfloat16, rows spread evenly,
unevenly, and over half of the experts: one matmul, and gate and up with SwiGLU ("two matmuls" is what its kernel
replaces). Forward (values alone), and the gradients of rows and weights. The bar: 80% of the dense matmul, and for gate
and up less time than two matmuls. Results are compared with the definition in float32 before anything is timed, and
lines are printed as in `attention_gpu`.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.ops._glu import swiglu
from maxlib.ops._grouped_matmul import grouped_glu, grouped_matmul
from tests.benchmarks.attention_gpu import (
    add_arguments,
    for_truth,
    measure_all,
    side_by_side,
    speeds,
    take_turns,
    verified,
)

SIZES = {"16 experts": (8192, 16, 4096, 2048), "128 experts": (65536, 128, 2048, 768)}  # M, E, I, O
TINY = {"tiny": (256, 4, 64, 128)}


def counts_of(M: int, E: int) -> dict[str, np.ndarray]:
    """Rows of each expert."""
    shares = np.random.default_rng(1).dirichlet(np.ones(E))
    return {
        "even": np.full(E, M // E),
        "uneven": np.random.default_rng(0).multinomial(M, shares),
        "half of the experts": np.repeat([2 * M // E, 0], E // 2),
    }


NAMES = {
    "matmul": ["default", "jax_mosaic_gpu", "tokamax", "mosaic_gpu", "tiled", "dense"],
    "SwiGLU": ["default", "jax_mosaic_gpu", "tokamax", "mosaic_gpu", "two matmuls", "tiled", "dense"],
}
MATMULS = {"matmul": {"forward": 1, "gradients": 2}, "SwiGLU": {"forward": 2, "gradients": 6}}  # with gate and up again


def contender(op: str, name: str, counts):
    """A function of rows and a list of weights."""
    how = {"default": None, "two matmuls": "mosaic_gpu"}.get(name, name)
    one = functools.partial(grouped_matmul, rows_per_expert=counts, implementation=how)
    if name == "dense":
        one = lambda rows, w: rows @ w.T
    if op == "matmul":
        return lambda rows, weights: one(rows, weights[0])
    if name in ("dense", "two matmuls"):
        return lambda rows, weights: swiglu(*(one(rows, w) for w in weights))
    return lambda rows, weights: grouped_glu(rows, *weights, counts, implementation=how)


def arrays(op: str, name: str, sizes: tuple[int, ...], dtype=jnp.bfloat16) -> tuple:
    """Rows, matrices and the output's cotangent."""
    M, E, I, O = sizes
    keys = jax.random.split(jax.random.key(0), 4)
    matrix = (O, I) if name == "dense" else (E, O, I)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
    weights = [draw(key, *matrix) for key in keys[2 : 3 if op == "matmul" else 4]]
    return draw(keys[0], M, I), weights, draw(keys[1], M, O)


def compile_one(op: str, name: str, counts, sizes, dtype=jnp.bfloat16, jit=jax.jit) -> dict[str, Callable]:
    """Compiled calls by phase."""
    rows, weights, d_out = arrays(op, name, sizes, dtype)
    run = contender(op, name, counts)
    forward = jit(run).lower(rows, weights).compile()
    gradients = jit(lambda r, w, d: jax.vjp(run, r, w)[1](d)).lower(rows, weights, d_out).compile()
    return {"forward": lambda: forward(rows, weights), "gradients": lambda: gradients(rows, weights, d_out)}


def truths(op: str, counts, sizes) -> dict[str, list[jax.Array]]:
    """Results of the definition in float32, by phase; of `tiled` where its loop is long to compile."""
    with jax.default_matmul_precision("float32"):
        found = compile_one(op, "reference" if len(counts) <= 16 else "tiled", counts, sizes, jnp.float32, for_truth)
        return {phase: jax.tree.leaves(run()) for phase, run in found.items()}


def measure(op: str, counts, sizes: tuple[int, ...], names: Sequence[str] | None, rounds: int) -> Iterator[dict]:
    M, _, I, O = sizes
    truth = truths(op, counts, sizes)
    runs = side_by_side({name: functools.partial(compile_one, op, name, counts, sizes) for name in NAMES[op]}, names)
    for phase, matmuls in MATMULS[op].items():
        here = {name: found if isinstance(found, str) else found[phase] for name, found in runs.items()}
        for name, run in here.items():
            if not isinstance(run, str) and name != "dense":  # which multiplies other numbers
                here[name] = verified(run, truth[phase])
        seconds = take_turns(here, rounds)
        dense = seconds.get("dense", "not asked for")
        for name, found in seconds.items():
            row = {"phase": phase, "contender": name}
            if isinstance(found, str):
                yield row | {"left_out": found}
            else:
                share = {} if isinstance(dense, str) else {"of_dense": dense / found}
                yield row | speeds(found, tflops=2e-12 * matmuls * M * I * O) | share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", help="which contenders (default: all)")
    add_arguments(parser)
    args = parser.parse_args()
    cases = {
        f"{op} {size} {about}": (
            {"op": op, "case": size, "rows": about},
            functools.partial(measure, op, jnp.asarray(counts), sizes, args.contenders),
        )
        for (size, sizes), op in itertools.product((TINY if args.tiny else SIZES).items(), NAMES)
        for about, counts in counts_of(*sizes[:2]).items()
    }
    measure_all(cases, args)


if __name__ == "__main__":
    main()
