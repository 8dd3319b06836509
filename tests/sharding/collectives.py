"""Counts the collectives of `test_covering` anew, and says how a device's bytes compare with those of one that is
alone.

    python -m tests.sharding.collectives [MODEL ...] > counts.jsonl

What it prints, one case a line, is what `collectives.jsonl` holds: look at what changed before you take it over.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import jax

from tests.sharding import test_covering as covering


def main() -> None:
    asked = [(name, case) for name, case in covering.pairs() if name in (sys.argv[1:] or covering.MODELS)]
    for name, case in sorted(asked, key=not_by_default):
        want, got = covering.alone(name, case.num_layers)[1], covering.spread(name, case)
        row = {"case": f"{name} {case.name}", "collectives": dict(sorted(got.collectives.items()))}
        print(json.dumps(row), flush=True)
        matrices, temporaries = want.matrices / got.matrices, want.temporaries / got.temporaries
        error = max(covering.errors(got, want).values())
        print(
            f"{row['case']}: matrices / {matrices:.2f}, temporaries / {temporaries:.2f}, {error:.1e}", file=sys.stderr
        )
        jax.clear_caches()  # a process can map so many programs only


def not_by_default(case: tuple[str, covering.Case]) -> bool:
    return f"{case[0]} {case[1].name}" not in covering.DEFAULT


if __name__ == "__main__":
    main()
