"""Runs tokamax's grouped matmuls in Triton on a CPU, in numpy, by Triton's own interpreter, and prints their errors.

    TRITON_INTERPRET=1 python -m tests.ops.triton_interpreter

A process of its own: Triton reads that variable when it is imported, and then compiles nothing.
"""

import json

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
from triton.runtime import interpreter

from maxlib.ops._grouped_matmul.tokamax_triton import TritonTile, TritonTiles, tokamax
from tests.ops.test_grouped_matmul import arrays, loop

COUNTS = {
    "uneven": [101, 0, 77, 130],
    "rows left over": [1, 139, 3, 0],
    "one expert": [0, 308, 0, 0],
    "less than a tile each": [7, 8, 9, 1],
    "whole tiles": [128, 0, 64, 116],
    "empty in front, between and behind": [0, 64, 0, 0],
    "nothing": [0, 0, 0, 0],
}
M, I, O = 308, 96, 160
SMALL = TritonTile(32, 64, 16)
TILES = {"default": TritonTiles(), "small": TritonTiles(SMALL, SMALL, SMALL)}


class Pointer:
    """An array as Triton's interpreter takes it."""

    def __init__(self, array):
        self.array, self.dtype = array, {"float32": "fp32", "int32": "i32"}[str(array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data


def triton_call(*args, kernel, out_type, grid, name, num_warps, num_stages, **constants):
    """A stand-in for `jax_triton.triton_call`; what a kernel does not write is NaN."""
    present = [i for i, x in enumerate(args) if x is not None]

    def run(*arguments):
        out, pointers = np.full(out_type.shape, np.nan, out_type.dtype), list(args)
        for i, x in zip(present, arguments, strict=True):
            pointers[i] = Pointer(np.array(x, order="C"))
        kernel[grid](*pointers, Pointer(out), **constants)
        return out

    like = jax.ShapeDtypeStruct(out_type.shape, out_type.dtype)
    return jax.pure_callback(run, like, *(args[i] for i in present))


def errors(counts, weight_order: str, tiles: TritonTiles) -> list[float]:
    """The largest error of the value, the gradient of the rows and that of the weights, by the largest value."""
    rows, weights, d_out = arrays(M, I, O, 4)
    spoiled, d_spoiled = (x.at[sum(counts) :].set(jnp.nan) for x in (rows, d_out))  # those of no expert
    turn = (lambda w: w) if weight_order == "EOI" else (lambda w: w.swapaxes(1, 2))
    run = lambda rows, weights: tokamax(rows, weights, jnp.array(counts), weight_order, tiles=tiles)
    out, pull = jax.vjp(run, spoiled, turn(weights))
    d_rows, d_weights = pull(d_spoiled)
    want = loop(rows, weights, counts, d_out)
    pairs = zip((out, d_rows, turn(d_weights)), want, strict=True)
    return [float(np.abs(np.asarray(x, np.float64) - y).max() / max(1, np.abs(y).max())) for x, y in pairs]


def main() -> None:
    jax_triton.triton_call = triton_call
    # The arrays are numpy's, in place of torch's, and need no copies.
    interpreter.GridExecutor._init_args_hst = lambda self, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    differences = {}
    for name, counts in COUNTS.items():
        for order, tiles in (("EOI", "default"), ("EIO", "small")):
            differences[f"{name}, {order}"] = errors(counts, order, TILES[tiles])
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
