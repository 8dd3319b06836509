"""Compiles every kernel for Hopper to machine code without a GPU; prints registers, spills and overlap as a table.

    python -m tests.ops.sass [--widths 128,128 ...] [--kernels attention grouped] [--json out.json]

Needs the CUDA compiler that `pip install "jax[cuda13]" nvidia-cuda-nvdisasm` brings; `nox -s kernels` makes such
environments. Fails where a kernel of heads up to 128 spills, one of wider heads spills 256 bytes or more, the assembler
warns of lost performance (matmuls in sequence, registers not handed over), or an exponential that should run beside a
matmul waits for it.
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
os.environ |= {"MOSAIC_GPU_DUMP_TO": str(DUMP), "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from maxlib.kernels.attention.mosaic_gpu import config  # noqa: E402
from maxlib.kernels.grouped_matmul.mosaic_gpu import glu  # noqa: E402
from maxlib.kernels.grouped_matmul.mosaic_gpu import mosaic_gpu as grouped_matmul  # noqa: E402
from maxlib.ops import ClampedSwiGLU, swiglu  # noqa: E402
from maxlib.ops._attention import mosaic_gpu as module  # noqa: E402
from maxlib.plan._targets import devices_of, parse_target  # noqa: E402
from tests.ops.attention.kernels import by_name  # noqa: E402

mosaic_gpu, mosaic_gpu_mla = by_name(module.mosaic_gpu), by_name(module.mosaic_gpu_mla)
GROUPED_TILES = dict.fromkeys(("forward", "d_rows"), "128 x 256") | dict.fromkeys(("glu", "gate_up"), "128 x 2 x 128")
GROUPED_TILES["d_weights"] = "128 x 128"
LATENTS = [(576, 512), (320, 256)]
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

    query, ends = array(jnp.bfloat16, B, 1, N, Hk), [array(jnp.int32, B, 1)] * 2
    about = {"Hk": Hk, "Hv": Hv, "softcap": softcap is not None}
    parts = _compiled((both, (q, k, v, *bounds, sinks)), (decoding, (query, k, v, *ends, sinks)))
    # The gradients of keys and values once more, with blocks of threads that sum over all query heads.
    processors, config.processors = config.processors, lambda: 1
    full_rows = _compiled((lambda *inputs: both(*inputs)[1][1:3], (q, k, v, *bounds, sinks)))
    config.processors = processors
    names = {row["kernel"] for row in parts}
    return [about | row for row in (*parts, *(row for row in full_rows if row["kernel"] not in names))]


def compile_latents(widths: tuple[int, int]) -> list[dict]:
    """One row for the kernel that decodes a cache of latents, of 128 heads."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    (Hk, Hv), (B, S, N) = widths, (2, 4096, 128)

    def decoding(q, k, start, end):
        return mosaic_gpu_mla(q, k, k[..., :Hv], k_start=start, k_end=end, scale=0.1)

    q, k, ends = array(jnp.bfloat16, B, 1, N, Hk), array(jnp.bfloat16, B, S, 1, Hk), [array(jnp.int32, B, 1)] * 2
    return [{"Hk": Hk, "Hv": Hv, "softcap": False} | row for row in _compiled((decoding, (q, k, *ends)))]


def compile_grouped_matmul() -> list[dict]:
    """One row per kernel, with float32 weights, as when training."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    M, I, O, E = 1000, 256, 512, 16
    rows, weights, d_out = array(jnp.bfloat16, M, I), array(jnp.float32, E, O, I), array(jnp.bfloat16, M, O)

    def both(rows, weights, counts, d_out):
        out, vjp = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, counts), rows, weights)
        return out, vjp(d_out)

    return [{"Hk": 0, "Hv": 0} | row for row in _compiled((both, (rows, weights, array(jnp.int32, E), d_out)))]


def compile_glu(activation, biased: bool) -> list[dict]:
    """Gate and up together: joined in the kernel, as it is when training, and the gradient of the rows."""
    here = jax.sharding.SingleDeviceSharding(devices_of(parse_target("h200"))[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    M, I, O, E = 1000, 256, 512, 16
    rows, weights, counts = array(jnp.bfloat16, M, I), array(jnp.bfloat16, E, O, I), array(jnp.int32, E)
    biases = (array(jnp.bfloat16, E, O),) * 2 if biased else ()

    def run(rows, gate, up, counts, biases):
        call = lambda rows: glu(rows, gate, up, counts, biases, "EOI", activation)
        out, vjp = jax.vjp(call, rows)
        return call(rows), vjp(out)

    return [{"Hk": 0, "Hv": 0} | row for row in _compiled((run, (rows, weights, weights, counts, biases)))]


def _compiled(*calls) -> list[dict]:
    """One row per kernel of these functions with their arguments."""
    for note in DUMP.iterdir():
        note.unlink()
    for function, shapes in calls:
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    notes = sorted(DUMP.glob("*.ptxas"))
    code = [next(DUMP.glob(note.stem + ".sass*")) for note in notes]  # the suffix depends on the version
    return [_read(note.read_text()) | _overlap(sass.read_text()) for note, sass in zip(notes, code, strict=True)]


def _overlap(sass: str) -> dict:
    """Counts the special functions (exponentials, a soft-cap's tanh) beside a matmul, and those that wait for it.

    A step waits until one of two matmuls is left in flight (`DEPBAR 0x1`), computes its exponentials, and waits for the
    other one (`DEPBAR 0x0`). What the assembler puts between that wait and the next matmul does not overlap.
    """
    events = re.findall(r"MUFU|HGMMA|DEPBAR\.LE gsb0, 0x[01]", sass)
    counts, place = {"beside": 0, "behind": 0}, None
    for event in events:
        if event.startswith("DEPBAR"):
            place = "beside" if event.endswith("1") else "behind" if place == "beside" else None
        elif event == "HGMMA":
            place = None
        elif place is not None:
            counts[place] += 1
    return counts


def _read(note: str) -> dict:
    """Registers and spills (bytes per thread) of one kernel, and warnings, from what the assembler says."""
    (name,) = set(re.findall(r"Compiling entry function '(?:attention|grouped_matmul)_(\w+?)_mosaic_gpu_kernel'", note))
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", note)[0]
    registers = re.findall(r"Used (\d+) registers", note)[-1]
    return {
        "kernel": name,
        "registers": int(registers),
        "spill_stores": int(stores),
        "spill_loads": int(loads),
        "warnings": re.findall(r"Potential Performance Loss: (.*)", note),  # C7508, C7510 and the like
    }


def fails(row: dict) -> bool:
    budget = 0 if max(row["Hk"], row["Hv"]) <= 128 or row["kernel"] == "latents" else 255
    # Every attention kernel has two matmuls in flight beside its exponentials, but dv's, which has one per tile, and
    # that of latents, whose other warpgroup multiplies meanwhile.
    beside = row["Hk"] > 0 and row["kernel"] not in ("dv", "dv_parts", "latents")
    waits = beside and (row["beside"] == 0 or row["behind"] > 0)
    return bool(row["warnings"]) or waits or max(row["spill_stores"], row["spill_loads"]) > budget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="*", type=lambda x: tuple(map(int, x.split(","))), default=WIDTHS)
    parser.add_argument("--kernels", nargs="*", choices=("attention", "grouped"), default=("attention", "grouped"))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    head = "Hk/Hv", "soft-cap", "kernel", "tiles", "registers", "spilled: stores, loads", "exps beside a matmul"
    print(f"jax {jax.__version__}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    rows = []
    for about, row in _all(args.widths if "attention" in args.kernels else (), "grouped" in args.kernels):
        print(_line(about, row), flush=True)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "kernels": rows}, indent=1))
    return int(any(map(fails, rows)))


def _all(widths, grouped: bool):
    """Yields the name and the row of every kernel."""
    for some in widths:
        for softcap in (None, 30.0):
            for row in compile_all(some, softcap):
                yield f"{row['Hk']}/{row['Hv']}", row | {"tiles": _tiles(row)}
    for some in LATENTS if widths else ():
        for row in compile_latents(some):
            yield f"{row['Hk']}/{row['Hv']}", row | {"tiles": f"64 x {config.latent_tiles(row['Hk']).columns}"}
    calls = {
        "grouped matmul": compile_grouped_matmul,
        "grouped GLU": functools.partial(compile_glu, swiglu, biased=False),
        "clamped, with biases": functools.partial(compile_glu, ClampedSwiGLU(), biased=True),
    }
    for about, compile_it in calls.items() if grouped else ():
        for row in compile_it():
            yield about, row | {"tiles": GROUPED_TILES[row["kernel"]]}


def _line(about: str, row: dict) -> str:
    """One line of the table."""
    spills = f"{row['spill_stores']}, {row['spill_loads']}"
    overlap = f"{row['beside']} of {row['beside'] + row['behind']}" if row["beside"] else "-"
    cap, note = "yes" if row.get("softcap") else "-", " **over budget**" if fails(row) else ""
    return f"| {about} | {cap} | {row['kernel']} | {row['tiles']} | {row['registers']} | {spills} | {overlap}{note} |"


def _tiles(row: dict) -> str:
    """Rows that stay x columns that stream."""
    widths = row["Hk"], row["Hv"]
    names = row["kernel"].removesuffix("_parts")
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
