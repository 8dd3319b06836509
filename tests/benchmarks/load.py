"""Loading a sharded checkpoint in its stored dtype: speed against plainly reading the bytes, and the host memory it
takes.

    python -m tests.benchmarks.load [--family llama4] [--gigabytes 2] [--rounds 3]

A Llama in bfloat16, or a Llama 4, which is nearly all experts, in files of at most 0.5 GB. Both read with the page
cache warm, in turn, each in a process of its own: plain reading into one buffer, and `maxlib.from_pretrained` up to the
last array. Peak memory is that process's, over what it had after its imports (Linux).
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import maxlib
from maxlib import ops
from maxlib.models import llama, llama4
from maxlib.weights.files import find_tensors

READ = """
import pathlib, sys, time
begin = time.perf_counter()
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    buffer = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        view = memoryview(buffer)
        while view and (n := file.readinto(view)):
            view = view[n:]
print(time.perf_counter() - begin, 0, 0)
"""
LOAD = """
import pathlib, re, sys, time
import jax, maxlib
from maxlib import models, weights
jax.devices(), weights.families()
# Of this process alone: getrusage would count what its parent held before exec.
status = pathlib.Path("/proc/self/status")
peak = lambda: 1024 * int(re.search("VmHWM:\\s+([0-9]+)", status.read_text())[1])
before, begin = peak(), time.perf_counter()
model = jax.block_until_ready(maxlib.from_pretrained(sys.argv[1]))
seconds = time.perf_counter() - begin
print(seconds, peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(model)))
"""


def write(directory: Path, family: str, gigabytes: float) -> list[int]:
    """A checkpoint of about this size; the bytes of its two largest tensors."""
    sizes: dict[str, Any] = {
        "vocab": 32_000,
        "dim": 2048,
        "mlp_dim": 5632,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
    }
    layers = lambda each: max(round((gigabytes - 0.26) / each), 1)
    if family == "llama":
        build, rope = llama.Llama, ops.Rope(128, max_length=4096)
        cfg: Any = llama.Config(**sizes, num_layers=layers(0.1007), rope=rope)
    else:
        build, rope = llama4.Llama4, ops.Rope(128, interleaved=True, max_length=4096)
        experts: dict[str, Any] = {"num_experts": 8, "expert_dim": 3072, "chunk": 4096}
        cfg = llama4.Config(**sizes, **experts, num_layers=layers(0.371), rope=rope)
    shapes = jax.eval_shape(lambda: build(cfg, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, jnp.bfloat16), shapes)
    maxlib.save_pretrained(model, directory, max_shard_bytes=500_000_000)
    tensors = find_tensors(directory).values()
    return sorted(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)[-2:]


def run(code: str, directory: Path) -> list[float]:
    out = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
    return [float(x) for x in out.stdout.split()[-3:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["llama", "llama4"], default="llama")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        largest = write(directory, args.family, args.gigabytes)
        jax.clear_caches()
        run(READ, directory)  # warms the page cache
        rounds = [(run(READ, directory), run(LOAD, directory)) for _ in range(args.rounds)]
    size = rounds[0][1][2]
    share = statistics.median(read[0] / load[0] for read, load in rounds)
    speeds = [statistics.median(size / 1e9 / pair[i][0] for pair in rounds) for i in range(2)]
    peak, allowed = max(load[1] for _, load in rounds), size + sum(largest)
    print(f"{size / 1e9:.2f} GB: reading {speeds[0]:.2f} GB/s, loading {speeds[1]:.2f} GB/s, share {share:.2f}")
    print(f"peak memory {peak / 1e9:.2f} GB; model and its two largest tensors {allowed / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
