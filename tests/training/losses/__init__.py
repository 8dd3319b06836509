"""The losses of a small training run, all digits of all steps, one file for each machine architecture and jax version.

A change that moves any digit must change the file in the same commit: `python -m tests.training.losses --write`.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

COMMAND = "python -m tests.training.losses --write"
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# One device, one thread and one set of instructions, whatever the machine has: the order of sums depends on them.
# Without "platform dependent math", processors differ in the bits of their own reciprocal roots; oneDNN, which
# multiplies matrices, asks the processor by itself, and so does YNNPACK, which has no limit to set. The others make
# compiling cheap.
FLAGS = (
    "--xla_force_host_platform_device_count=1 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_experimental_ynn_fusion_type= "
    "--xla_backend_extra_options=xla_cpu_disable_platform_dependent_math"
)
if jax.__version__.startswith("0.10."):  # newer compilers have one kind of emitter and refuse the flag
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
X86 = {"XLA_FLAGS": f"{FLAGS} --xla_cpu_max_isa=AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def file() -> Path:
    """Returns the path of this machine's losses, whether or not they were written yet."""
    return HERE / f"{platform.machine()}-jax-{jax.__version__}.txt"


def compute() -> str:
    """Trains in a separate process, which inherits no setting of jax or XLA, and returns the losses."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "MAXLIB_"))}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)}
    env |= X86 if platform.machine() in ("x86_64", "AMD64") else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.losses.train"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the training run failed:\n{done.stderr[-3000:]}")
    return done.stdout
