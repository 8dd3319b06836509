"""Compiles every TPU kernel without a TPU, and prints the memory that each program takes beside its arguments as a
table.

    python -m tests.ops.tpu v5e [--json out.json]

Needs libtpu (`pip install "maxlib[tpu]"`), and a process for each topology; `nox -s kernels_tpu` runs them all. Fails
where a kernel does not compile, where memory does not grow in proportion to the sequence, where decoding copies a
cache of eight heads, or where the kernels of the gated delta rule take more than its chunks in XLA, or a plan does not
count them. (Fewer heads have another layout in memory than a matrix of all heads has, and are copied.) Grouped matmuls
are compiled with the tiles that are chosen for the chip; tiles that do not fit in its vector memory are an error.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from maxlib.distributed.xla_flags import WITHOUT_TPU

# Before jax is imported: no TPU is looked for, and another process may have libtpu too.
os.environ |= WITHOUT_TPU | {"JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from maxlib import ops
from maxlib.kernels.attention.mosaic_tpu import config, mosaic_tpu
from maxlib.ops._gated_delta import api
from maxlib.ops._grouped_matmul import megablox
from maxlib.plan._hlo import read_costs

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
MIB = 2**20

# about: B, T, S, N, K, Hk, Hv, soft-cap
BOTH_PASSES = {
    "16k": (1, 16384, 16384, 16, 8, 128, 128, None),
    "32k": (1, 32768, 32768, 16, 8, 128, 128, None),
    "odd lengths": (2, 1000, 777, 8, 2, 64, 64, 30.0),
    "MLA": (2, 1000, 777, 8, 8, 192, 128, None),
    "wide heads": (2, 1000, 777, 4, 4, 256, 256, 30.0),
    "odd heads": (2, 1000, 777, 3, 1, 80, 80, None),
}
DECODING = {
    "one token": (8, 1, 32768, 32, 8, 128, 128, None),
    "four tokens, odd length": (2, 4, 5000, 8, 4, 64, 64, 30.0),
    "a short cache": (2, 1, 33, 8, 8, 64, 64, None),
    "one key head": (4, 1, 8192, 128, 1, 576, 512, None),
}
# about: B, T, K, N, Hk, Hv, dtype
DELTA = {
    "delta, 8k": (1, 8192, 16, 32, 128, 128, jnp.bfloat16),
    "delta, 8k, float32": (1, 8192, 16, 32, 128, 128, jnp.float32),
    "delta, odd sizes": (2, 1000, 2, 6, 96, 64, jnp.bfloat16),
    "delta, many values to a key": (1, 1100, 1, 16, 128, 128, jnp.float32),
    "delta, wide heads": (1, 300, 2, 2, 256, 256, jnp.float32),
    "delta, few tokens": (2, 5, 2, 4, 128, 128, jnp.bfloat16),
}
# about: rows of a device, the width of the model, that of an expert, experts
GROUPED = {
    "grouped, Qwen3-30B-A3B": (16384, 2048, 768, 4),
    "grouped, Qwen3-235B-A22B": (32768, 4096, 1536, 2),
    "grouped, GPT-OSS-120B": (16384, 2880, 2880, 2),
    "grouped, Mixtral-8x7B": (16384, 4096, 14336, 1),
    "grouped, DeepSeek-V3": (32768, 7168, 2048, 2),
    "grouped, few rows": (6, 2048, 1408, 64),
}
COMPARED = ("delta, 8k",)  # with chunks in XLA


def compile_delta(device, sizes: tuple, implementation: str, *, gradients: bool):
    """The gated delta rule in one or both passes, compiled."""
    (B, T, K, N, Hk, Hv, dtype), here = sizes, jax.sharding.SingleDeviceSharding(device)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((B, *shape), dtype, sharding=here)
    q, v, rates, state = array(dtype, T, K, Hk), array(dtype, T, N, Hv), array(jnp.float32, T, N), (N, Hk, Hv)

    def run(d, starts, state, *x):
        rule = lambda *x: ops.gated_delta_rule(
            *x[:5], is_start=starts, initial_state=x[5], implementation=implementation
        )
        if not gradients:
            return rule(*x, state)
        out, vjp = jax.vjp(rule, *x, state)
        return out, vjp((d, out[1]))

    given = v, array(jnp.bool_, T), array(jnp.float32, *state), q, q, v, rates, rates
    return jax.jit(run).trace(*given).lower(lowering_platforms=("tpu",)).compile()


def delta(device) -> list[str]:
    """Prints the temporary memory of both implementations, in MiB; returns the cases whose FLOPs are not counted.

    Since `chunked` has a backward pass of its own, it takes less memory than the kernels, which copy their arguments to
    another layout.
    """
    api.current_device = lambda: ("tpu", device.device_kind)  # which is not here
    print("\n| | pass | `chunked`, MiB | `mosaic_tpu`, MiB |\n|---|---|---|---|")
    fails = []
    for about, sizes in DELTA.items():
        for gradients in (False, True) if about in COMPARED else (True,):
            compiled = compile_delta(device, sizes, "mosaic_tpu", gradients=gradients)
            found, other = memory_of(compiled), None
            if about in COMPARED:
                other = memory_of(compile_delta(device, sizes, "chunked", gradients=gradients))
            B, T, _, N, Hk, Hv, _ = sizes
            counted = read_costs(compiled.as_text(), {}).flops
            if counted < 2 * B * T * N * (2 * 64 * Hv + 3 * Hk * Hv):
                fails.append(about)
            cells = about, "both" if gradients else "forward", "" if other is None else f"{other:.0f}", f"{found:.0f}"
            print(f"| {' | '.join(cells)} |", flush=True)
    return fails


def grouped(device) -> None:
    """Compiles both passes of grouped matmuls, and prints their tiles."""
    megablox.current_device = lambda: ("tpu", device.device_kind)  # which is not here
    print(
        "\n| | dtype | tiles of rows, summed and out: forward, gradient of rows, of weights | compiled, s |\n|---|---|---|---|"
    )
    for about, sizes in GROUPED.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            begin = time.perf_counter()
            tiles = compile_grouped(device, sizes, dtype)
            cells = [
                " x ".join(map(str, dataclasses.astuple(one))) for one in (tiles.forward, tiles.d_rows, tiles.d_weights)
            ]
            print(
                f"| {about} | {dtype.__name__} | {', '.join(cells)} | {time.perf_counter() - begin:.0f} |", flush=True
            )


def compile_grouped(device, sizes: tuple, dtype):
    """Compiles a grouped matmul and its gradients, with float32 weights as in training, and returns its tiles."""
    (M, I, O, E), here = sizes, jax.sharding.SingleDeviceSharding(device)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    given = array(dtype, M, I), array(jnp.float32, E, O, I), array(jnp.int32, E), array(dtype, M, O)

    def run(rows, weights, counts, d_out):
        out, vjp = jax.vjp(lambda rows, weights: megablox.megablox(rows, weights, counts), rows, weights)
        return out, vjp(d_out)

    jax.jit(run).trace(*given).lower(lowering_platforms=("tpu",)).compile()
    return megablox.matmuls(*given[:2], "EOI", device.device_kind).tiles()


def memory_of(compiled) -> float:
    """MiB of temporary memory in HBM."""
    return compiled.memory_analysis().temp_size_in_bytes / MIB


def compile_one(device, sizes: tuple, *, gradients: bool, dtype=jnp.bfloat16) -> int:
    """Bytes of temporary memory in HBM."""
    B, T, S, N, K, Hk, Hv, softcap = sizes
    here, chip = jax.sharding.SingleDeviceSharding(device), config.generation(device.device_kind)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    q, k, v = array(dtype, B, T, N, Hk), array(dtype, B, S, K, Hk), array(dtype, B, S, K, Hv)
    sinks, bounds, d_out = array(jnp.float32, N), [array(jnp.int32, B, T)] * 2, array(dtype, B, T, N, Hv)

    def run(q, k, v, sinks, start, end, d_out):
        options = {"k_start": start, "k_end": end, "scale": 0.1, "softcap": softcap, "chip": chip}
        call = lambda q, k, v, sinks: mosaic_tpu(q, k, v, sinks=sinks, **options)
        if not gradients:
            return call(q, k, v, sinks)
        (out, lse), vjp = jax.vjp(call, q, k, v, sinks)
        return out, vjp((d_out, lse))

    lowered = jax.jit(run).trace(q, k, v, sinks, *bounds, d_out).lower(lowering_platforms=("tpu",))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def arguments(sizes: tuple) -> int:
    B, T, S, N, K, Hk, Hv, _ = sizes
    return 2 * B * (T * N * (Hk + Hv) + S * K * (Hk + Hv))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", choices=TOPOLOGIES)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[args.topology]).devices[0]
    print(f"jax {jax.__version__}, {device.device_kind}\n\n| | arguments, MiB | temporary, MiB |\n{'|---' * 3}|")
    temporary = {}
    for gradients, cases in ((True, BOTH_PASSES), (False, DECODING)):
        for about, sizes in cases.items():
            temporary[about] = compile_one(device, sizes, gradients=gradients)
            print(f"| {about} | {arguments(sizes) / MIB:.0f} | {temporary[about] / MIB:.0f} |", flush=True)
    fails = [
        about
        for about, sizes in DECODING.items()
        if sizes[4] % 8 == 0 and temporary[about] > MIB + 0.1 * arguments(sizes)
    ]
    if temporary["32k"] > min(2.2 * temporary["16k"], 3 * arguments(BOTH_PASSES["32k"])):
        fails.append("32k")
    fails += delta(device)
    grouped(device)
    if args.json:
        args.json.write_text(json.dumps({"device": device.device_kind, "temporary": temporary, "fails": fails}))
    if fails:
        print("over budget:", ", ".join(fails))
    return int(bool(fails))


if __name__ == "__main__":
    sys.exit(main())
