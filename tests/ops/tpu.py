"""Compiles the grouped matmuls of TPUs without a TPU, with the tiles that are chosen for the chip, and prints these.

    python -m tests.ops.tpu v5e

Needs libtpu (`pip install "maxlib[tpu]"`), and a process for each topology; `nox -s kernels_tpu` runs them all. Tiles
that do not fit in the chip's vector memory are an error.
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

from maxlib.ops._grouped_matmul import megablox

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", choices=TOPOLOGIES)
    topology = TOPOLOGIES[parser.parse_args().topology]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    megablox.current_device = lambda: ("tpu", device.device_kind)  # which is not here
    print(f"jax {jax.__version__}, {device.device_kind}\n")
    print("| | dtype | tiles of rows, summed and out: forward, gradient of rows, of weights | compiled, s |")
    print("|---" * 4 + "|")
    for name, sizes in SIZES.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            begin = time.perf_counter()
            tiles = compile_both_passes(device, sizes, dtype)
            passes = (tiles.forward, tiles.d_rows, tiles.d_weights)
            written = ", ".join(" x ".join(map(str, dataclasses.astuple(tile))) for tile in passes)
            print(f"| {name} | {dtype.__name__} | {written} | {time.perf_counter() - begin:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
