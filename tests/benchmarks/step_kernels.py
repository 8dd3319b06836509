"""The kernels of a training step compiled for a GPU: launches, and bytes of main memory by what they are for.

    python -m tests.benchmarks.step_kernels [--remat full] [--unstacked]

Four layers of Llama 3.1 8B with embedding and head, four rows of 4,096 tokens on one H100, in bfloat16 with AdamW: the
slice that `tests.benchmarks.mfu` times. It needs jax's CUDA plugin, no GPU. Milliseconds are the bytes by the data
sheet's bandwidth. The last column is a count by hand of what a step cannot avoid.
"""

import argparse
import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flax import nnx

from maxlib import hardware, plan
from maxlib.models import llama
from maxlib.plan._hlo import _Program
from maxlib.plan._hlo_text import Instruction, computation_of

SLICE = dataclasses.replace(llama.PRESETS["llama3.1-8b"], num_layers=4)
ROWS, LENGTH = 4, 4096
NOT_LAUNCHED = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


def unstacked() -> llama.Llama:
    """Returns the slice with its layers stored one by one."""
    model = llama.Llama(SLICE, rngs=nnx.Rngs(0))
    model.layers = model.layers.unstacked()
    return model


def minimum() -> dict[str, float]:
    """Returns bytes that a step moves at least, apart from matmuls and attention, counted by hand."""
    cfg, tokens = SLICE, ROWS * LENGTH
    x, hidden, logits = 2 * tokens * cfg.dim, 2 * tokens * cfg.mlp_dim, 4 * tokens * cfg.vocab
    kv = 2 * tokens * cfg.num_kv_heads * cfg.head_dim
    block = cfg.mlp_dim * 3 * cfg.dim + cfg.head_dim * cfg.dim * 2 * (cfg.num_heads + cfg.num_kv_heads)
    head = cfg.vocab * cfg.dim
    # Forward: two norms with their residuals 2 x + 4 x, rope of queries and keys 2 x + 2 kv, SwiGLU 3, a residual 3 x.
    # Backward: SwiGLU reads three and writes three, norms 4 x each, rope as forward.
    activations = 11 * x + 2 * kv + 3 * hidden + 6 * hidden + 10 * x + 2 * kv
    casts = 6 * block + 6 * block  # weights to bfloat16, their gradients to float32
    return {
        "layers": cfg.num_layers * (activations + casts),
        "loss": 2.5 * logits,  # one pass for the maximum and the sum, one for the gradient in bfloat16
        "optimizer": (28 + 4) * (cfg.num_layers * block + 2 * head),  # AdamW: four read, three written; the norm
        "embedding and head": 6 * head + 12 * head,  # casts; the gradient of the looked-up rows
    }


def kernels(program: _Program, name: str, times: float = 1) -> Iterator[tuple[str, float, float]]:
    """Yields purpose, launches and bytes of each kernel of a computation."""
    computation = program.computations[name]
    in_loss = times > 1 and any(f"{SLICE.vocab}]" in each.type for each in computation.values() if "gemm" in each.name)
    for instruction in computation.values():
        if instruction.opcode == "while":
            runs = program._trips(instruction, computation)
            yield from kernels(program, computation_of(instruction, "body"), times * runs)
        elif instruction.opcode == "call":
            yield from kernels(program, computation_of(instruction, "to_apply"), times)
        elif instruction.opcode not in NOT_LAUNCHED:
            size = times * program._traffic(instruction, computation)
            yield purpose(instruction, times, in_loss), times, size


def purpose(instruction: Instruction, launches: float, in_loss: bool) -> str:
    """Returns what a kernel is for, by its name and the operation that it came from."""
    source = re.search(r'op_name="([^"]*)"', instruction.rest)
    operation = source[1] if source else ""
    if "gemm" in instruction.name or "cublas" in instruction.rest:
        return "matmuls of the loss" if in_loss else "matmuls"
    if "mosaic_gpu" in instruction.rest:
        return "attention"
    if in_loss:
        return "loss"
    if launches == 1 and "broadcast_fusion" in instruction.name:
        return "zeros for a scan's results"
    if launches > 1 and ("dynamic_update_index" in operation or "dynamic_index" in operation):
        return "a scan's reads and writes"
    if "jvp" not in operation:
        return "optimizer"
    return "embedding and head" if f"[{SLICE.vocab}," in instruction.type else "layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remat")
    parser.add_argument("--unstacked", action="store_true")
    args = parser.parse_args()
    model = "tests.benchmarks.step_kernels:unstacked" if args.unstacked else SLICE
    job = plan.Job(model, "h100", per_device_batch_size=ROWS, sequence=LENGTH, remat=args.remat)
    with tempfile.TemporaryDirectory() as folder:
        report = plan.plan(job, keep=folder)
        (text,) = (path.read_text() for path in Path(folder).glob("*gpu_after_optimizations.txt"))
    chip = hardware.CHIPS["h100"]
    program = _Program(text, {"fsdp": 1}, (), {}, chip.cache / 4, 0)
    launched, moved = Counter(), Counter()
    for name, launches, size in kernels(program, program.entry):
        launched[name] += int(launches)
        moved[name] += size
    least = minimum()
    print(f"{'':28}launches     GB     ms  at least, GB")
    for name, size in moved.most_common():
        ms = 1e3 * size / chip.bandwidth
        bound = f"{least[name] / 1e9:14.1f}" if name in least else ""
        print(f"{name:28}{launched[name]:8}{size / 1e9:7.1f}{ms:7.1f}{bound}")
    print(f"{'all':28}{sum(launched.values()):8}{sum(moved.values()) / 1e9:7.1f}")
    print(f"matmuls at the peak: {1e3 * report.estimate.compute:.0f} ms; peak {report.peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
