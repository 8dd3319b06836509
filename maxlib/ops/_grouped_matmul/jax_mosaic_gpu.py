"""JAX's own grouped matmul kernels for NVIDIA's Hopper and Blackwell (`jax.experimental.pallas.ops.gpu`).

JAX tests those of the forward pass and of the gradient of the rows on both. Of the gradient of the weights it has none
for Blackwell, and its test of the one for Hopper is switched off: tokamax's kernel in Triton computes it where it is
installed, and `tiled` elsewhere. tokamax's kernel in Mosaic GPU for Hopper was wrong on an H100 (docs/kernels.md).

The kernels are imported when they are first called: importing Pallas takes longer than importing maxlib.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import vary_alike
from maxlib.hardware import is_blackwell, is_hopper
from maxlib.kernels.grouped_matmul.rows import only_used
from maxlib.kernels.unbatched import unbatched
from maxlib.ops._grouped_matmul.call import GroupedCall
from maxlib.ops._grouped_matmul.ragged_tiles import (
    WIDTH,
    RaggedBlackwellTiles,
    RaggedHopperTiles,
    RaggedTile,
    RaggedTiles,
    TritonTile,
    hopper_tiles,
)
from maxlib.ops._grouped_matmul.tiled import tiled_outer
from maxlib.ops._grouped_matmul.tokamax_triton import by_experts, has_triton

AXES = frozenset({"sm", "x", "wg", "warp", "m", "n", "g"})  # what the kernels call their own axes
BAND = 4  # columns of tiles that Hopper's kernels compute before the next ones, so that they share rows in the cache


def jax_mosaic_gpu(
    rows: Float[Array, "M I"],
    weights: Float[Array, "E O I"] | Float[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: None = None,
    tiles: RaggedTiles | None = None,
) -> Float[Array, "M O"]:
    """Computes `grouped_matmul` with JAX's kernels for the generation of GPUs that `tiles` are for; None for Hopper."""
    M = len(rows)
    if M == 0:
        return jnp.zeros((0, weights.shape[weight_order.index("O")]), rows.dtype)
    tiles = tiles or hopper_tiles(M, len(weights))
    # The kernels read whole tiles of rows: those of no expert have to be zeros, because 0 * NaN is NaN.
    tile_rows = 128 if isinstance(tiles, RaggedHopperTiles) else 256
    rows = only_used(jnp.pad(rows, ((0, -M % tile_rows), (0, 0))), rows_per_expert)
    rows, weights, rows_per_expert = vary_alike((rows, weights, rows_per_expert))
    y: Any = _multiply(rows, weights, rows_per_expert, weight_order, tiles)
    return y[:M]


def tiles_for(device_kind: str, M: int, E: int) -> RaggedTiles:
    """Chooses tiles of a device's kernels for M rows of E experts."""
    if is_blackwell(device_kind):
        return RaggedBlackwellTiles(d_weights=TritonTile() if has_triton() else None)
    return hopper_tiles(M, E, has_triton())


def refuses(call: GroupedCall) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None."""
    kind = call.device_kind
    if not is_hopper(kind) and (not is_blackwell(kind) or "300" in kind):
        return f"is for NVIDIA's Hopper (H100, H200, GH200, H800, H20) and Blackwell (B200, GB200), not for {kind}"
    if reason := call.refuses_operands() or call.refuses_widths(WIDTH):
        return reason
    if taken := AXES & set(jax.sharding.get_abstract_mesh().axis_names):
        return f"has axes of these names itself, which the mesh must not have: {', '.join(sorted(taken))}"
    wide = jax.dtypes.canonicalize_dtype("int64").itemsize == 8
    return "needs 32-bit integers, but jax_enable_x64 is set" if wide else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(rows, weights, rows_per_expert, weight_order: str, tiles: RaggedTiles):
    """Multiplies each row by its expert's matrix, over the dimension of `weights` that `weight_order` calls I."""
    return _by_rows(rows, weights, rows_per_expert, tiles, "forward", turned=weight_order == "EOI")


def _forward(rows, weights, rows_per_expert, weight_order, tiles):
    return _multiply(rows, weights, rows_per_expert, weight_order, tiles), (rows, weights, rows_per_expert)


def _backward(weight_order, tiles, residuals, d_out):
    rows, weights, rows_per_expert = residuals
    d_out = only_used(d_out, rows_per_expert)
    # y = x w^T: dx = dy w, and dw = dy^T x, summed over the rows of each expert.
    d_rows = _by_rows(d_out, weights, rows_per_expert, tiles, "d_rows", turned=weight_order == "EIO")
    pair = (d_out, rows) if weight_order == "EOI" else (rows, d_out)
    if tiles.d_weights is None:
        return d_rows, tiled_outer(*pair, rows_per_expert, dtype=weights.dtype), None
    return d_rows, by_experts(*pair, rows_per_expert, weights.dtype, tiles.d_weights), None


_multiply.defvjp(_forward, _backward)


def _by_rows(rows, weights, rows_per_expert, tiles: RaggedTiles, name: str, *, turned: bool):
    """Multiplies `M K` by `E K N`, or by `E N K` if `turned`; the last expert takes the rows of no expert."""
    # These rows are zeros, and so are their products. The kernel computes their tiles anyhow, but stores only rows of
    # an expert.
    counts = rows_per_expert.at[-1].add(len(rows) - rows_per_expert.sum())
    run = _blackwell if isinstance(tiles, RaggedBlackwellTiles) else _hopper
    kernel = unbatched(functools.partial(run, tiles=getattr(tiles, name, tiles), turned=turned))
    with jax.named_scope(f"grouped_matmul_{name}"):
        return _like(rows, kernel(rows, weights.astype(rows.dtype), counts))


def _hopper(rows, weights, counts, *, tiles: RaggedTile, turned: bool):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return ragged_dot(
        rows,
        weights,
        group_sizes=counts,
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=tiles.summed,
        grid_block_n=BAND,
        max_concurrent_steps=tiles.stages,
        transpose_rhs=turned,
    )


def _blackwell(rows, weights, counts, *, tiles: RaggedBlackwellTiles, turned: bool):
    from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu as jaxs
    from jax.experimental.pallas.ops.gpu.blackwell_matmul_mgpu import MatmulDimension

    config = jaxs.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=WIDTH,
        max_concurrent_steps=tiles.stages,
        collective=True,
        grid_tile_width=tiles.band,
        grid_minor_dim=MatmulDimension.M,
    )
    # The kernel takes matrices in one order only, [E, K, N], and N in whole tiles.
    weights = weights.swapaxes(1, 2) if turned else weights
    N = weights.shape[2]
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -N % 256)))
    with _processors(jaxs, 148):
        return jaxs.ragged_dot_kernel(rows, weights, counts, config)[:, :N]


def _like(operand, result):
    """Marks a kernel's result as varying over the mesh axes of an operand, which JAX's kernels leave out."""
    return vary_alike((operand, result))[1]


@contextlib.contextmanager
def _processors(module: Any, count: int) -> Iterator[None]:
    """Lets a kernel of JAX be compiled without a GPU, as plans do: it asks the first device how many processors it has.

    Args:
        module: The kernel's module.
        count: What it is told if that device is no GPU.
    """
    if jax.devices()[0].platform == "gpu":
        yield
        return

    def known():
        return [types.SimpleNamespace(core_count=count)]

    stand_in = types.SimpleNamespace(**vars(jax) | {"devices": known, "local_devices": known})
    before, module.jax = module.jax, stand_in
    try:
        yield
    finally:
        module.jax = before
