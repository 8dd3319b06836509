"""The three recurrences on one NVIDIA GPU: milliseconds and temporary memory of `chunked` and of the kernels of
jax-linear-attention, at the sizes of published models, in one run.

    python -m tests.benchmarks.recurrences_gpu [--cases delta ...] [--rounds 10] [--minutes 9] [--json out.jsonl]
    python -m tests.benchmarks.recurrences_gpu --tiny   # the same code at small sizes, also on a CPU

Everything is compiled first, side by side. Contenders take turns, round by round, each round ten calls and one wait;
the table shows medians. Every result is compared with `chunked` in float32: `error` is the largest, of outputs and
gradients, by the norm of an array. What a contender cannot do, or fails at, is left out with its reason. Each result is
a line of JSON as soon as it is there, and cases that begin after `--minutes` are left out.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import ops
from tests.benchmarks.attention_gpu import (
    add_arguments,
    attempt,
    compiled,
    for_truth,
    measure_all,
    nothing_here,
    off_by,
    speeds,
    take_turns,
)

CONTENDERS = ("chunked", "jax_linear_attention")


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of tokens in bfloat16, as a layer of a model has them.

    Args:
      op: the operation.
      about: the model.
      key_heads: heads of keys, or groups.
      heads: heads of values.
      key_dim: width of keys, or size of the state.
      value_dim: width of values.
      documents: documents in a row.
      tokens: tokens in a row.
      rows: rows.
    """

    op: str
    about: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    documents: int = 1
    tokens: int = 8192
    rows: int = 1

    def tiny(self) -> "Case":
        """Returns the same case at a size for a CPU."""
        heads = min(2, self.heads // self.key_heads)
        return dataclasses.replace(self, tokens=130, key_heads=1, heads=heads)

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the inputs; heads forget over ten to thousands of tokens."""
        keys = iter(jax.random.split(jax.random.key(0), 6))
        draw = lambda *shape: jax.random.normal(next(keys), (self.rows, self.tokens, *shape))
        K, N, half = self.key_heads, self.heads, jnp.bfloat16
        a, b = (draw(K, self.key_dim).astype(half) for _ in range(2))
        v, slow = draw(N, self.value_dim).astype(half), jnp.logspace(-4, -1, N)
        if self.op == "ssd":
            return {"x": v, "dt": jax.nn.softplus(draw(N)), "a": -slow, "b": a, "c": b}
        by_channel = self.op == "kimi_delta_attention"
        decay = (
            slow[:, None] * jax.nn.softplus(draw(N, self.key_dim)) if by_channel else slow * jax.nn.softplus(draw(N))
        )
        return {"q": a, "k": b, "v": v, "log_decay": -decay, "beta": jax.nn.sigmoid(draw(N))}

    def starts(self) -> jax.Array | None:
        """Returns the first tokens of documents, or None for one document."""
        if self.documents == 1:
            return None
        first = np.arange(self.tokens) % -(-self.tokens // self.documents) == 0
        return jnp.asarray(np.broadcast_to(first, (self.rows, self.tokens)))

    def call(self, implementation: str, x: dict[str, jax.Array]) -> jax.Array:
        """Returns the outputs."""
        run = ops.ssd if self.op == "ssd" else ops.gated_delta_rule
        return run(**x, is_start=self.starts(), implementation=implementation)[0]

    def both(self, implementation: str, x: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the outputs and the gradients, for ones behind every output."""
        out, pull = jax.vjp(functools.partial(self.call, implementation), x)
        return out, pull(jnp.ones_like(out))[0]


DELTA, KIMI = functools.partial(Case, "gated_delta_rule"), functools.partial(Case, "kimi_delta_attention")
CASES = {
    "delta": DELTA("Qwen3-Next", 16, 32, 128, 128),
    "kimi": KIMI("Kimi Linear", 32, 32, 128, 128),
    "ssd": Case("ssd", "Nemotron-H 8B", 8, 128, 128, 64),
    "delta, packed": DELTA("Qwen3-Next, eight documents", 16, 32, 128, 128, 8),
    "kimi, packed": KIMI("Kimi Linear, eight documents", 32, 32, 128, 128, 8),
    "ssd, packed": Case("ssd", "Nemotron-H 8B, eight documents", 8, 128, 128, 64, 8),
}


def programs(case: Case, name: str, dtype: Any = jnp.bfloat16, jit: Callable = jax.jit) -> dict[str, Any]:
    """Compiles the forward pass, and both passes."""
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype), jax.eval_shape(case.arrays))
    lower = lambda phase: jit(functools.partial(phase, name)).lower(x).compile()
    return {"both": lower(case.both), "forward": lower(case.call)}


def truth(case: Case) -> dict[str, Any]:
    """Compiles `chunked` in float32."""
    with jax.default_matmul_precision("float32"):
        return programs(case, "chunked", jnp.float32, for_truth)


def measure(case: Case, made: dict[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Compares and times compiled programs."""
    x = case.arrays()
    want = attempt(lambda: made["truth"]["both"](jax.tree.map(lambda a: a.astype(jnp.float32), x)))
    contenders = {name: result for name, result in made.items() if name != "truth"}
    for phase in ("both", "forward"):
        runs = {
            name: program if isinstance(program, str) else functools.partial(program[phase], x)
            for name, program in contenders.items()
        }
        for name, result in take_turns(runs, rounds).items():
            row = {"phase": phase, "contender": name}
            if isinstance(result, str):
                yield row | {"left_out": result}
                continue
            temporary = contenders[name][phase].memory_analysis().temp_size_in_bytes / 2**20
            row |= speeds(result, tokens_per_s=case.rows * case.tokens) | {"temporary_mib": round(temporary)}
            yield row | ({"error": attempt(lambda run=runs[name]: error(run(), want))} if phase == "both" else {})


def error(got: Any, want: Any) -> float:
    """Returns the largest error of an array, relative to its norm."""
    return max(float(off_by(a, b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which cases (default: all)")
    add_arguments(parser)
    args = parser.parse_args()
    if nothing_here(args):
        return
    cases = {name: CASES[name].tiny() if args.tiny else CASES[name] for name in args.cases}
    makes = {
        name: {contender: functools.partial(programs, case, contender, None) for contender in CONTENDERS}
        | {"truth": functools.partial(truth, case)}
        for name, case in cases.items()
    }
    made = compiled(makes, None)
    runs = {
        name: ({"op": case.op, "case": case.about}, functools.partial(measure, case, made[name]))
        for name, case in cases.items()
    }
    measure_all(runs, args)


if __name__ == "__main__":
    main()
