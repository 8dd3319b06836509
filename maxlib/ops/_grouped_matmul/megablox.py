"""JAX's own grouped matmul kernels for TPUs (megablox, after arXiv:2211.15841).

Their cost is proportional to the rows in both passes. With `jax.lax.ragged_dot_general` the compiler implements the
transposed matmul, which gives the gradient of the weights, and libtpu 0.0.42, which jax 0.10.2 requires, multiplies
every row by every expert there.

The kernels are imported when they are first called: importing Pallas takes longer than importing maxlib.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from maxlib.hardware import current_device
from maxlib.kernels.grouped_matmul.megablox_tiles import Matmuls, MegabloxTiles, Sizes, Tiles
from maxlib.kernels.grouped_matmul.rows import only_used, unbatched
from maxlib.kernels.vector_memory import asking, vmem_of
from maxlib.ops._grouped_matmul.call import GroupedCall
from maxlib.ops._grouped_matmul.xla import summed_in

DTYPES = ("bfloat16", "float32")


def megablox(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: None = None,
    tiles: MegabloxTiles | None = None,
    zero_rest: bool = True,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul` with JAX's kernel. Tiles are shrunk to the call; by default `Matmuls.tiles`."""
    of = matmuls(rows, weights, weight_order, current_device()[1])
    return _multiply(rows, weights, rows_per_expert, weight_order, (tiles or of.tiles()).fit(of), zero_rest)


def refuses(call: GroupedCall) -> str | None:
    """Returns the reason why the kernel cannot run a call, or None."""
    if call.out_dtype is None and call.dtype in DTYPES:
        return None
    return "takes bfloat16 and float32, and returns the dtype of its rows"


def default_tiles(call: GroupedCall) -> MegabloxTiles | None:
    """Chooses the tiles of a call; None for narrow operands, which `megablox_outer` widens."""
    if call.dtype not in DTYPES:
        return None
    width, weight_width = jnp.dtype(call.dtype).itemsize, jnp.dtype(call.weight_dtype).itemsize
    vmem = vmem_of(call.device_kind)
    return Matmuls.of(call.rows, call.weight_shape, call.weight_order, width, weight_width, vmem).tiles()


def matmuls(rows: Any, weights: Any, weight_order: str, device_kind: str) -> Matmuls:
    """Returns the matmuls of a call on a device, from arrays or their shapes and dtypes."""
    width, weight_width = rows.dtype.itemsize, jnp.dtype(getattr(weights, "dtype", rows.dtype)).itemsize
    return Matmuls.of(rows.shape[0], tuple(weights.shape), weight_order, width, weight_width, vmem_of(device_kind))


def megablox_outer(
    d_out: Num[Array, "M O"],
    rows: Num[Array, "M I"],
    rows_per_expert: Int[Array, " E"],
    tiles: MegabloxTiles | None = None,
) -> Float[Array, "E O I"]:
    """Computes `grouped_outer` with JAX's kernel; narrower operands are widened to bfloat16 without loss."""
    exact = summed_in(rows.dtype)
    d_out, rows = (x if str(x.dtype) in DTYPES else x.astype(jnp.bfloat16) for x in (d_out, rows))
    weights = jax.ShapeDtypeStruct((len(rows_per_expert), d_out.shape[1], rows.shape[1]), exact)
    of = matmuls(rows, weights, "EOI", current_device()[1])
    fitting = (tiles or of.tiles()).d_weights.fit(of.d_weights)
    return _outer(d_out, rows, rows_per_expert, exact, fitting)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _multiply(rows, weights, rows_per_expert, weight_order: str, tiles: MegabloxTiles, zero_rest: bool):
    """Multiplies each row by its expert's matrix, over the dimension of `weights` that `weight_order` calls I."""
    weights, transpose = weights.astype(rows.dtype), weight_order == "EOI"
    return _rows(rows, weights, rows_per_expert, tiles.forward, transpose=transpose, zero_rest=zero_rest)


def _forward(rows, weights, rows_per_expert, *options):
    return _multiply(rows, weights, rows_per_expert, *options), (rows, weights, rows_per_expert)


def _backward(weight_order, tiles, zero_rest, residuals, d):
    rows, weights, rows_per_expert = residuals
    # y = x w^T: dx = dy w, and dw = dy^T x, summed over the rows of each expert.
    matrices, transpose = weights.astype(d.dtype), weight_order == "EIO"
    d_rows = _rows(d, matrices, rows_per_expert, tiles.d_rows, transpose=transpose, zero_rest=zero_rest)
    pair = (d, rows) if weight_order == "EOI" else (rows, d)
    return d_rows, _outer(*pair, rows_per_expert, weights.dtype, tiles.d_weights), None


_multiply.defvjp(_forward, _backward)


def _rows(rows, weights, rows_per_expert, tiles: Tiles, *, transpose: bool, zero_rest: bool):
    """Multiplies `M K` by `E K N`, or by `E N K` if `transpose`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    M, N = len(rows), weights.shape[1 if transpose else 2]
    of = Sizes(M, rows.shape[1], N, len(weights), rows.dtype.itemsize, rows.dtype.itemsize, transposed=False)

    def multiply(rows, weights, rows_per_expert):
        kernel = functools.partial(
            gmm, preferred_element_type=rows.dtype, tiling=_sizes(tiles), transpose_rhs=transpose
        )
        out = asking(kernel, tiles.asked(of))(_padded(rows, tiles), weights, rows_per_expert)[:M]
        # The kernel does not write rows beyond the last expert's.
        return only_used(out, rows_per_expert) if zero_rest else out

    return unbatched(multiply)(rows, weights, rows_per_expert)


def _outer(left, right, rows_per_expert, dtype: Any, tiles: Tiles):
    """Computes `left[start:end].T @ right[start:end]` for each expert: `M K` and `M N` to `E K N`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    E, width, out_width = len(rows_per_expert), left.dtype.itemsize, jnp.dtype(dtype).itemsize
    of = Sizes(len(left), left.shape[1], right.shape[1], E, width, out_width, transposed=True)

    def multiply(left, right, rows_per_expert):
        left, right = (_padded(x, tiles) for x in (left, right))
        kernel = functools.partial(tgmm, preferred_element_type=dtype, tiling=_sizes(tiles))
        return asking(kernel, tiles.asked(of))(left.swapaxes(0, 1), right, rows_per_expert)  # the kernel takes [K, M]

    return unbatched(multiply)(left, right, rows_per_expert)


def _sizes(tiles: Tiles) -> tuple[int, int, int]:
    return tiles.rows, tiles.summed, tiles.out


def _padded(rows, tiles: Tiles):
    """Pads rows to whole tiles."""
    return jnp.pad(rows, ((0, -rows.shape[0] % tiles.rows), (0, 0)))
