"""tokamax's grouped matmuls in Triton, for NVIDIA GPUs since Ampere (`maxlib[cuda]`, on Python 3.12 or later).

They mask rows beyond an expert's, so that rows of no expert may be anything. They are imported when they are first
called.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import vary_alike
from maxlib.hardware import is_ampere_or_later
from maxlib.kernels.grouped_matmul.rows import only_used, unbatched
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.tokamax_gpu import INSTALL, parse_no_flags, version
from maxlib.ops._grouped_matmul.call import GroupedCall

NEEDED = {"tokamax": (0, 0, 17), "jax-triton": (0, 4, 1), "triton": (3, 7)}  # the oldest versions that were tried
# [M, I] x [E, I, O] -> [M, O], and [M, O] x [M, I] -> [E, O, I]: rows of each expert by its matrix, or summed over.
BY_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@dataclasses.dataclass(frozen=True)
class TritonTile(TileSizes):
    """A tile of tokamax's kernels in Triton.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        summed: Numbers that are summed in one step.
        warps: Warps that compute the tile.
        stages: Steps whose operands are in shared memory at once.
    """

    rows: int = 128
    columns: int = 256
    summed: int = 32
    warps: int = 8
    stages: int = 4

    def __post_init__(self):
        self.require(16, "rows", "columns", "summed")
        self.require(1, "warps", "stages")
        self.require_powers_of_two("rows", "columns", "summed", "warps")


@dataclasses.dataclass(frozen=True)
class TritonTiles(TileSizes):
    """Tiles of tokamax's grouped matmuls in Triton, one for each pass.

    The defaults are among the fastest of tokamax's measurements on an A100, of those whose registers do not spill.
    """

    forward: TritonTile = TritonTile(rows=64, warps=4)
    d_rows: TritonTile = TritonTile(rows=64, warps=4)
    d_weights: TritonTile = TritonTile()

    kernel: ClassVar[str] = "grouped_matmul/tokamax"


@functools.cache
def has_triton() -> bool:
    """Returns True if tokamax's kernels in Triton can be imported, without importing them."""
    return all(version(name) >= least for name, least in NEEDED.items())


def tokamax(
    rows: Float[Array, "M I"],
    weights: Float[Array, "E O I"] | Float[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: None = None,
    tiles: TritonTiles | None = None,
) -> Float[Array, "M O"]:
    """Computes `grouped_matmul` with tokamax's kernels."""
    if len(rows) == 0:
        return jnp.zeros((0, weights.shape[weight_order.index("O")]), rows.dtype)
    rows, weights, rows_per_expert = vary_alike((rows, weights, rows_per_expert))
    return _multiply(rows, weights, rows_per_expert, weight_order, tiles or TritonTiles())


def refuses(call: GroupedCall) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None."""
    if not is_ampere_or_later(call.device_kind):
        return f"is for NVIDIA's GPUs since Ampere, not for {call.device_kind}"
    if reason := call.refuses_operands():
        return reason
    needed = ", ".join(f"{name} {'.'.join(map(str, least))}" for name, least in NEEDED.items())
    return None if has_triton() else f"needs {needed}: {INSTALL} on Python 3.12 or later"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(rows, weights, rows_per_expert, weight_order: str, tiles: TritonTiles):
    matrices = weights if weight_order == "EIO" else weights.swapaxes(1, 2)  # [E, I, O]
    return _by_rows(rows, matrices, rows_per_expert, tiles.forward, "forward")


def _forward(rows, weights, rows_per_expert, weight_order, tiles):
    return _multiply(rows, weights, rows_per_expert, weight_order, tiles), (rows, weights, rows_per_expert)


def _backward(weight_order, tiles, residuals, d_out):
    rows, weights, rows_per_expert = residuals
    matrices = weights if weight_order == "EOI" else weights.swapaxes(1, 2)  # [E, O, I]
    d_rows = _by_rows(d_out, matrices, rows_per_expert, tiles.d_rows, "d_rows")
    pair = (d_out, rows) if weight_order == "EOI" else (rows, d_out)
    return d_rows, _by_experts(*pair, rows_per_expert, weights.dtype, tiles.d_weights), None


_multiply.defvjp(_forward, _backward)


def _by_rows(rows, matrices, rows_per_expert, tile: TritonTile, name: str):
    """Multiplies `M K` by `E K N`; rows of no expert, which the kernel does not write, are zeros."""
    matrices = matrices.astype(rows.dtype)
    with jax.named_scope(f"grouped_matmul_{name}"):
        return only_used(_kernel(rows, matrices, rows_per_expert, BY_ROWS, rows.dtype, tile), rows_per_expert)


def _by_experts(left, right, rows_per_expert, dtype: Any, tile: TritonTile):
    """Computes `left[start:end].T @ right[start:end]` for each expert: `M K` and `M N` to `E K N`."""
    with jax.named_scope("grouped_matmul_d_weights"):
        return _kernel(left, right, rows_per_expert, OVER_ROWS, dtype, tile)


def _kernel(left, right, rows_per_expert, dims: jax.lax.RaggedDotDimensionNumbers, dtype: Any, tile: TritonTile):
    parse_no_flags()
    from tokamax._src.ops.ragged_dot.triton import Config, TritonRaggedDot

    config = Config(
        block_m=tile.rows,
        block_n=tile.columns,
        block_k=tile.summed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    # The check asks the default device, which need not be the one that a program is compiled for.
    kernel = TritonRaggedDot(config=config, bypass_device_check=True)

    def multiply(left, right, counts):
        return kernel(
            left,
            right,
            group_sizes=counts,
            ragged_dot_dimension_numbers=dims,
            preferred_element_type=jnp.dtype(dtype),
        )

    return vary_alike((left, unbatched(multiply)(left, right, rows_per_expert)))[1]
