"""Runs the Kimi delta attention of jax-linear-attention in Pallas's interpreter, both passes, against float64.

    python -m tests.ops.linear_attention_interpreter [RATE OF DECAY]

The interpreter waits for ever inside a compiled function, or where JAX has a single thread: it needs two cores. It does
not run the kernels of the other two recurrences (jax 0.11.2).
"""

import dataclasses
import functools
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

from maxlib.ops._recurrent import delta_rule, jax_linear_attention, kimi_delta, recurrence
from tests.ops import test_jax_linear_attention as tests


def main() -> None:
    slow = float(sys.argv[1]) if len(sys.argv) > 1 else 0.05
    recurrence.current_device = lambda: tests.H100
    delta_rule._gated_delta_rule = delta_rule._gated_delta_rule.__wrapped__  # not compiled
    interpreted = functools.partial(jax_linear_attention.kimi_delta, interpret=True)
    kernels = [
        dataclasses.replace(k, run=interpreted) if k.name == tests.NAME else k for k in kimi_delta.KIMI_DELTA.kernels
    ]
    vars(kimi_delta.KIMI_DELTA)["kernels"] = tuple(kernels)
    run = functools.partial(tests.results, tests.KDA, tests.NAME)
    differences = tests.compared(tests.KDA, run, 100, (2, 2), (64, 64), slow)
    print({name: float(f"{error:.2g}") for name, error in differences.items()})
    tests.check(differences)


if __name__ == "__main__":
    main()
