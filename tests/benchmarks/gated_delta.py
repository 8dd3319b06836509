"""Gated delta rule, Kimi delta attention or state-space duality: chunks against the definition, and the memory of a
training step.

    python -m tests.benchmarks.gated_delta [--op ssd|kimi_delta_attention] [--tokens 8192] [--rounds 3]

Memory is what XLA allocates beside arguments and results for the forward and backward pass.
"""

import argparse

import jax
import jax.numpy as jnp

from tests.benchmarks.recurrences_gpu import Case
from tests.benchmarks.timing import compiled, measure, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="gated_delta_rule", choices=("gated_delta_rule", "kimi_delta_attention", "ssd"))
    for name, default in {"tokens": 8192, "width": 128, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    case = Case(args.op, "", 4 if args.op == "kimi_delta_attention" else 2, 4, args.width, args.width, 1, args.tokens)
    x = jax.tree.map(lambda a: a.astype(jnp.float32), case.arrays())

    def loss(implementation):
        return lambda x: jnp.sum(case.call(implementation, x) ** 2)

    for passes, transform in (("forward", lambda f: f), ("forward + backward", jax.grad)):
        programs = {name: compiled(transform(loss(name)), x) for name in ("chunked", "sequential")}
        times = measure({name: run for name, (run, _) in programs.items()}, args.rounds)
        memory = {name: mib for name, (_, mib) in programs.items()}
        show(f"{args.tokens} tokens, 4 heads of {args.width}, {passes}", times, "chunked", memory)


if __name__ == "__main__":
    main()
