"""Compiles the grouped matmuls and the recurrences of TPUs without a TPU, with the tiles that are chosen for the chip.

    python -m tests.ops.tpu v5e [--only matmuls]

Prints tiles of grouped matmuls, and the bytes that recurrences move. Needs libtpu (`pip install "maxlib[tpu]"`), and
a process for each topology; `nox -s kernels_tpu` runs them all. What does not fit in the chip's vector memory is an
error.
"""

import argparse
import dataclasses
import os
import sys
import time

from maxlib.distributed.xla_flags import WITHOUT_TPU

# Before jax is imported: no TPU is looked for, and another process may have libtpu too.
os.environ |= WITHOUT_TPU | {"JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from maxlib import ops
from maxlib.ops._grouped_matmul import megablox
from maxlib.ops._recurrent import recurrence
from maxlib.plan._hlo import read_costs

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Rows of a device, the width of the model, that of an expert, experts.
SIZES = {
    "Qwen3-30B-A3B": (16384, 2048, 768, 4),
    "Qwen3-235B-A22B": (32768, 4096, 1536, 2),
    "GPT-OSS-120B": (16384, 2880, 2880, 2),
    "Mixtral-8x7B": (16384, 4096, 14336, 1),
    "DeepSeek-V3": (32768, 7168, 2048, 2),
    "few rows": (6, 2048, 1408, 64),
}
# Rows of 8,192 tokens of the op, with so many heads of keys (groups) and values, and their widths.
TOKENS = 8192
RECURRENCES = {
    "Qwen3-Next": ("gated_delta_rule", 16, 32, 128, 128),
    "Nemotron-H 8B": ("ssd", 8, 128, 128, 64),
    "Bamba 9B, one group": ("ssd", 1, 128, 128, 64),
}


def compile_recurrence(device, sizes: tuple, dtype, implementation: str):
    """Compiles both passes of a recurrence, whose arrays come and go as projections have them, with heads joined."""
    (op, K, N, Hk, Hv), rates = sizes, jax.ShapeDtypeStruct((1, TOKENS, sizes[2]), jnp.float32)
    keys, values = (jax.ShapeDtypeStruct((1, TOKENS, width), dtype) for width in (K * Hk, N * Hv))

    def run(q, k, v, log_decay, beta):
        q, k, v = (a.reshape(1, TOKENS, heads, -1) for a, heads in ((q, K), (k, K), (v, N)))
        if op == "ssd":
            out, _ = ops.ssd(v, beta, log_decay[0, 0], k, q, implementation=implementation)
        else:
            out, _ = ops.gated_delta_rule(q, k, v, log_decay, beta, implementation=implementation)
        return out.reshape(1, TOKENS, -1)

    def both(d_out, *x):
        out, pull = jax.vjp(run, *x)
        return out, pull(d_out)

    mesh = jax.sharding.Mesh([device], ("device",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in (values, keys, keys, values, rates, rates)
    )
    return jax.jit(both).trace(*operands).lower(lowering_platforms=("tpu",)).compile()


def fewest_bytes(sizes: tuple, width: int) -> int:
    """Counts what both passes must move: inputs and outputs, once more with their gradients, and a state per chunk."""
    _, K, N, Hk, Hv = sizes
    keys, values, rates, states = 2 * K * Hk * width, N * Hv * width, 2 * N * 4, 4 * N * Hk * Hv // 128
    forward = keys + 2 * values + rates + states
    return TOKENS * (forward + (keys + 2 * values + rates + states) + (keys + values + rates))


def print_recurrences(device) -> None:
    recurrence.current_device = lambda: ("tpu", device.device_kind)
    print(
        "\n| recurrence, both passes, 8,192 tokens | dtype | implementation | GB moved | of the fewest | GFLOP | compiled, s |"
    )
    print("|---" * 7 + "|")
    for name, sizes in RECURRENCES.items():
        for dtype, implementation in (
            (jnp.bfloat16, "chunked"),
            (jnp.bfloat16, "mosaic_tpu"),
            (jnp.float32, "mosaic_tpu"),
        ):
            begin = time.perf_counter()
            compiled = compile_recurrence(device, sizes, dtype, implementation)
            costs, fewest = (
                read_costs(compiled.as_text() or "", {"device": 1}),
                fewest_bytes(sizes, jnp.dtype(dtype).itemsize),
            )
            print(
                f"| {name} | {dtype.__name__} | `{implementation}` | {costs.bytes / 1e9:.2f} | {costs.bytes / fewest:.2f} "
                f"| {costs.flops / 1e9:.0f} | {time.perf_counter() - begin:.0f} |",
                flush=True,
            )


def compile_both_passes(device, sizes: tuple, dtype):
    """Compiles a grouped matmul and its gradients, with float32 weights as in training, and returns its tiles."""
    (M, I, O, E), here = sizes, jax.sharding.SingleDeviceSharding(device)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    operands = array(dtype, M, I), array(jnp.float32, E, O, I), array(jnp.int32, E), array(dtype, M, O)

    def run(rows, weights, counts, d_out):
        out, pull = jax.vjp(lambda rows, weights: megablox.megablox(rows, weights, counts), rows, weights)
        return out, pull(d_out)

    jax.jit(run).trace(*operands).lower(lowering_platforms=("tpu",)).compile()
    return megablox.matmuls(*operands[:2], "EOI", device.device_kind).tiles()


def print_matmuls(device) -> None:
    megablox.current_device = lambda: ("tpu", device.device_kind)  # which is not here
    print("| | dtype | tiles of rows, summed and out: forward, gradient of rows, of weights | compiled, s |")
    print("|---" * 4 + "|")
    for name, sizes in SIZES.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            begin = time.perf_counter()
            tiles = compile_both_passes(device, sizes, dtype)
            passes = (tiles.forward, tiles.d_rows, tiles.d_weights)
            written = ", ".join(" x ".join(map(str, dataclasses.astuple(tile))) for tile in passes)
            print(f"| {name} | {dtype.__name__} | {written} | {time.perf_counter() - begin:.0f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", choices=TOPOLOGIES)
    parser.add_argument("--only", choices=PARTS, help="what to compile (default: both)")
    args = parser.parse_args()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[args.topology]).devices[0]
    print(f"jax {jax.__version__}, {device.device_kind}\n")
    for name, part in PARTS.items():
        if args.only in (None, name):
            part(device)
    return 0


PARTS = {"matmuls": print_matmuls, "recurrences": print_recurrences}

if __name__ == "__main__":
    sys.exit(main())
