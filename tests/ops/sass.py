"""Compiles every kernel for Hopper to machine code without a GPU, and prints registers and spills as a table.

    python -m tests.ops.sass [--widths 128,128 ...] [--json out.json]

Needs the CUDA compiler that `pip install "jax[cuda13]"` brings; `nox -s kernels` makes such an environment. Fails where
a kernel of heads up to 128 spills, one of wider heads spills 256 bytes or more, or the compiler runs matmuls one after
the other.
"""

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

# Before jax is imported: where the compiler leaves its notes.
os.environ["JAX_PLATFORMS"] = "cpu"
DUMP = Path(tempfile.mkdtemp())
os.environ |= {"MOSAIC_GPU_DUMP_TO": str(DUMP), "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from maxlib.kernels.attention.mosaic_gpu import config, mosaic_gpu  # noqa: E402
from maxlib.kernels.grouped_matmul.mosaic_gpu import glu  # noqa: E402
from maxlib.kernels.grouped_matmul.mosaic_gpu import mosaic_gpu as grouped_matmul  # noqa: E402
from maxlib.ops._glu import ClampedSwiGLU, swiglu  # noqa: E402
from maxlib.plan._targets import devices_of, parse_target  # noqa: E402

WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


def compile_all(widths: tuple[int, int], softcap: float | None) -> list[dict]:
    """One row per kernel of a forward and backward pass, and of decoding."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    (Hk, Hv), (B, T, S, N, K) = widths, (2, 1000, 776, 8, 2)
    q, k, v = (array(jnp.bfloat16, *shape) for shape in ((B, T, N, Hk), (B, S, K, Hk), (B, S, K, Hv)))
    bounds, sinks = [array(jnp.int32, B, T)] * 2, array(jnp.float32, N)

    def both(q, k, v, start, end, sinks):
        call = lambda q, k, v, sinks: mosaic_gpu(
            q, k, v, k_start=start, k_end=end, scale=0.1, softcap=softcap, sinks=sinks
        )
        results, vjp = jax.vjp(call, q, k, v, sinks)
        return results, vjp(results)

    def decoding(q, k, v, start, end, sinks):
        return mosaic_gpu(q, k, v, k_start=start, k_end=end, scale=0.1, softcap=softcap, sinks=sinks)

    for note in DUMP.iterdir():
        note.unlink()
    jax.jit(both).trace(q, k, v, *bounds, sinks).lower(lowering_platforms=("cuda",)).compile()
    one, ends = array(jnp.bfloat16, B, 1, N, Hk), [array(jnp.int32, B, 1)] * 2
    jax.jit(decoding).trace(one, k, v, *ends, sinks).lower(lowering_platforms=("cuda",)).compile()
    about = {"Hk": Hk, "Hv": Hv, "softcap": softcap is not None}
    return [about | _read(note.read_text()) for note in sorted(DUMP.glob("*.ptxas"))]


def compile_grouped_matmul() -> list[dict]:
    """One row per kernel, with float32 weights, as when training."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    M, I, O, E = 1000, 256, 384, 16
    rows, weights, d_out = array(jnp.bfloat16, M, I), array(jnp.float32, E, O, I), array(jnp.bfloat16, M, O)

    def both(rows, weights, counts, d_out):
        out, vjp = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, counts), rows, weights)
        return out, vjp(d_out)

    for note in DUMP.iterdir():
        note.unlink()
    given = rows, weights, array(jnp.int32, E), d_out
    jax.jit(both).trace(*given).lower(lowering_platforms=("cuda",)).compile()
    return [{"Hk": 0, "Hv": 0} | _read(note.read_text()) for note in sorted(DUMP.glob("*.ptxas"))]


def compile_glu(activation, biased: bool) -> list[dict]:
    """Gate and up together: joined in the kernel, as it is when training, and the gradient of the rows."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    M, I, O, E = 1000, 256, 384, 16
    rows, weights, counts = array(jnp.bfloat16, M, I), array(jnp.bfloat16, E, O, I), array(jnp.int32, E)
    biases = (array(jnp.bfloat16, E, O),) * 2 if biased else ()

    def run(rows, gate, up, counts, biases):
        call = lambda rows: glu(rows, gate, up, counts, biases, "EOI", activation)
        out, vjp = jax.vjp(call, rows)
        return call(rows), vjp(out)

    for note in DUMP.iterdir():
        note.unlink()
    jax.jit(run).trace(rows, weights, weights, counts, biases).lower(lowering_platforms=("cuda",)).compile()
    return [{"Hk": 0, "Hv": 0} | _read(note.read_text()) for note in sorted(DUMP.glob("*.ptxas"))]


def _read(note: str) -> dict:
    """Registers and spills (bytes per thread) of one kernel, from what the assembler says."""
    (name,) = set(re.findall(r"Compiling entry function '(?:attention|grouped_matmul)_(\w+?)_mosaic_gpu_kernel'", note))
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", note)[0]
    registers = re.findall(r"Used (\d+) registers", note)[-1]
    slow = re.findall(r"wgmma.mma_async instructions are serialized", note)
    return {
        "kernel": name,
        "registers": int(registers),
        "spill_stores": int(stores),
        "spill_loads": int(loads),
        "serialized": bool(slow),
    }


def fails(row: dict) -> bool:
    budget = 0 if max(row["Hk"], row["Hv"]) <= 128 else 255
    return row["serialized"] or max(row["spill_stores"], row["spill_loads"]) > budget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="*", type=lambda x: tuple(map(int, x.split(","))), default=WIDTHS)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows = []
    print(
        f"jax {jax.__version__}\n\n| Hk/Hv | soft-cap | kernel | tiles | registers | spilled: stores, loads |\n{'|---' * 6}|"
    )
    for widths in args.widths:
        for softcap in (None, 30.0):
            for row in compile_all(widths, softcap):
                cap, spills = "yes" if softcap else "-", f"{row['spill_stores']}, {row['spill_loads']}"
                tiles = _tiles(row)
                note = " **over budget**" if fails(row) else ""
                print(
                    f"| {row['Hk']}/{row['Hv']} | {cap} | {row['kernel']} | {tiles} | {row['registers']} | {spills}{note} |",
                    flush=True,
                )
                rows.append(row | {"tiles": tiles})
    grouped = {
        "grouped matmul": compile_grouped_matmul,
        "grouped GLU": functools.partial(compile_glu, swiglu, biased=False),
        "clamped, with biases": functools.partial(compile_glu, ClampedSwiGLU(), biased=True),
    }
    for about, compile_it in grouped.items():
        for row in compile_it():
            tiles = "128 x 2 x 128" if row["kernel"] in ("glu", "gate_up") else "128 x 128"
            spills = f"{row['spill_stores']}, {row['spill_loads']}" + (" **over budget**" if fails(row) else "")
            print(f"| {about} | - | {row['kernel']} | {tiles} | {row['registers']} | {spills} |", flush=True)
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "kernels": rows}, indent=1))
    return int(any(map(fails, rows)))


def _tiles(row: dict) -> str:
    """Rows that stay x columns that stream."""
    widths = row["Hk"], row["Hv"]
    names = row["kernel"]
    if names == "forward":
        tiles = config.forward_tiles(*widths)
    elif names == "decode":
        tiles = config.decode_tiles(*widths)
    elif names == "dq":
        tiles = config.query_gradient_tiles(*widths, row["softcap"])
    else:
        tiles = config.key_gradient_tiles(*widths, row["softcap"])[tuple(names.split("_"))]
    return f"{tiles.rows} x {tiles.columns}"


if __name__ == "__main__":
    sys.exit(main())
