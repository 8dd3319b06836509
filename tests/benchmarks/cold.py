"""A cold DPO or GRPO run of `tests.benchmarks.learning`, maxlib's or TRL's: seconds of processor time that the process
takes for imports and for making and running the trainer, compilation included.

    python -m tests.benchmarks.cold START maxlib|trl dpo|grpo [--keep-memory]

START is the directory of the weights that both begin with; another process trains and writes them if it does not exist.
`--keep-memory` calls `maxlib.keep_freed_memory`, also for TRL's run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would count while they wait
MAKE = """
import sys
import jax
from flax import nnx
from maxlib import weights
from maxlib.models import llama
from tests.benchmarks import learning
start = jax.jit(lambda: llama.Llama(learning.CONFIG, rngs=nnx.Rngs(0)))()
weights.save_pretrained(learning.supervised("sft", start, 500, (False, True))[0], sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("start", type=Path)
    parser.add_argument("library", choices=["maxlib", "trl"])
    parser.add_argument("run", choices=["dpo", "grpo"])
    parser.add_argument("--keep-memory", action="store_true")
    args = parser.parse_args()
    if not args.start.exists():
        subprocess.run([sys.executable, "-c", MAKE, str(args.start)], check=True)
    if args.keep_memory:
        from maxlib import keep_freed_memory

        keep_freed_memory()
    imported, figures, processor = (of_maxlib if args.library == "maxlib" else of_trl)(args.start, args.run)
    print(f"{args.library}, {args.run}: imports {imported:.1f} s, the run {processor:.1f} s, {figures}")
    print(f"{imported + processor:.1f} s of processor time")


def of_maxlib(start: Path, run: str) -> tuple[float, dict[str, float], float]:
    """Returns seconds of imports and reading, the trained model's figures, and seconds of the run."""
    import jax.numpy as jnp

    import maxlib
    from tests.benchmarks import learning

    model = maxlib.from_pretrained(start, dtype=jnp.float32)
    imported = time.process_time()
    _, figures, _, (_, processor) = learning.RUNS[run](model, 0)
    return imported, figures, processor


def of_trl(start: Path, run: str) -> tuple[float, dict[str, float], float]:
    """Returns the same of TRL's trainer, with as many rows and steps."""
    from tests.post_training import learning_trl

    imported = time.process_time()
    from tests.benchmarks import learning  # for its sizes; jax and maxlib do not count

    rows = learning.PROMPTS * learning.GROUP if run == "grpo" else learning.ROWS
    sizes = {"steps": learning.STEPS[run], "rate": learning.RATES[run], "rows": rows, "group": learning.GROUP}
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(start, Path(directory) / "model")
        result = learning_trl.run(run, Path(directory), 0, **sizes)
    return imported, result["figures"], result["processor"]


if __name__ == "__main__":
    main()
