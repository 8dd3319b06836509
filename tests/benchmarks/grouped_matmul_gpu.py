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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.ops import grouped_glu, grouped_matmul, swiglu
from tests.benchmarks.attention_gpu import (
    add_arguments,
    compiled,
    for_truth,
    measure_all,
    nothing_here,
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
    "matmul": ["default", "tokamax", "mosaic_gpu", "tiled", "dense"],
    "SwiGLU": ["default", "tokamax", "mosaic_gpu", "two matmuls", "tiled", "dense"],
}
MATMULS = {"matmul": {"forward": 1, "gradients": 2}, "SwiGLU": {"forward": 2, "gradients": 6}}  # with gate and up again


def contender(op: str, name: str) -> Callable:
    """A function of rows, a list of weights and the rows of each expert."""
    how = {"default": None, "two matmuls": "mosaic_gpu"}.get(name, name)
    run = functools.partial(grouped_matmul, implementation=how)
    if name == "dense":
        run = lambda rows, w, counts: rows @ w.T
    if op == "matmul":
        return lambda rows, weights, counts: run(rows, weights[0], counts)
    if name in ("dense", "two matmuls"):
        return lambda rows, weights, counts: swiglu(*(run(rows, w, counts) for w in weights))
    return lambda rows, weights, counts: grouped_glu(rows, *weights, counts, implementation=how)


def shapes(op: str, name: str, sizes: tuple[int, ...], dtype=jnp.bfloat16) -> tuple:
    """Rows, matrices, and the output's cotangent, as shapes and dtypes."""
    M, E, I, O = sizes
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    matrix = struct(*((O, I) if name == "dense" else (E, O, I)))
    return struct(M, I), [matrix] * (1 if op == "matmul" else 2), struct(M, O)


def arrays(*about) -> tuple:
    """Random arrays of these shapes: the same numbers in every dtype."""
    leaves, tree = jax.tree.flatten(shapes(*about))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, shape: jax.random.normal(key, shape.shape, jnp.bfloat16).astype(shape.dtype)
    return jax.tree.unflatten(tree, map(draw, keys, leaves))


def programs(op: str, name: str, sizes, dtype=jnp.bfloat16, jit=jax.jit) -> dict[str, Callable]:
    """Compiles the values, and the gradients of rows and weights."""
    rows, weights, d_out = shapes(op, name, sizes, dtype)
    run, counts = contender(op, name), jax.ShapeDtypeStruct((sizes[1],), jnp.int32)
    gradients = lambda r, w, n, d: jax.vjp(lambda r, w: run(r, w, n), r, w)[1](d)
    return {
        "forward": jit(run).lower(rows, weights, counts).compile(),
        "gradients": jit(gradients).lower(rows, weights, counts, d_out).compile(),
    }


def runs_of(made: dict[str, Callable], counts, inputs: tuple) -> dict[str, Callable]:
    """Returns functions without arguments that run compiled programs."""
    rows, weights, d_out = inputs
    return {
        "forward": lambda: made["forward"](rows, weights, counts),
        "gradients": lambda: made["gradients"](rows, weights, counts, d_out),
    }


def truth(op: str, sizes) -> dict[str, Callable]:
    """Compiles the definition in float32, or `tiled` where a loop over the experts is long to compile."""
    with jax.default_matmul_precision("float32"):
        return programs(op, "reference" if sizes[1] <= 16 else "tiled", sizes, jnp.float32, for_truth)


def measure(op: str, counts, sizes: tuple[int, ...], made: Mapping[str, Any], rounds: int) -> Iterator[dict]:
    """Compares and times compiled programs with these rows of each expert."""
    M, _, I, O = sizes
    exact = runs_of(made["truth"], counts, arrays(op, "", sizes, jnp.float32))
    runs = {
        name: program if isinstance(program, str) else runs_of(program, counts, arrays(op, name, sizes))
        for name, program in made.items()
        if name != "truth"
    }
    for phase, matmuls in MATMULS[op].items():
        right = jax.tree.leaves(exact[phase]())
        here = {name: result if isinstance(result, str) else result[phase] for name, result in runs.items()}
        for name, run in here.items():
            if not isinstance(run, str) and name != "dense":  # which multiplies other numbers
                here[name] = verified(run, right)
        seconds = take_turns(here, rounds)
        dense = seconds.get("dense", "not asked for")
        for name, result in seconds.items():
            row = {"phase": phase, "contender": name}
            if isinstance(result, str):
                yield row | {"left_out": result}
            else:
                share = {} if isinstance(dense, str) else {"of_dense": dense / result}
                yield row | speeds(result, tflops=2e-12 * matmuls * M * I * O) | share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", help="which contenders (default: all)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    add_arguments(parser)
    args = parser.parse_args()
    if nothing_here(args):
        return
    chosen = TINY if args.tiny else {name: SIZES[name] for name in args.sizes}
    each = list(itertools.product(NAMES, chosen.items()))
    makes = {
        (op, size): {name: functools.partial(programs, op, name, sizes) for name in NAMES[op]}
        | {"truth": functools.partial(truth, op, sizes)}
        for op, (size, sizes) in each
    }
    made = compiled(makes, args.contenders)
    cases = {
        f"{op} {size} {about}": (
            {"op": op, "case": size, "rows": about},
            functools.partial(measure, op, jnp.asarray(counts, jnp.int32), sizes, made[op, size]),
        )
        for op, (size, sizes) in each
        for about, counts in counts_of(*sizes[:2]).items()
    }
    measure_all(cases, args)


if __name__ == "__main__":
    main()
