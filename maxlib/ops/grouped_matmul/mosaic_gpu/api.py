"""The implementation that `ops.grouped_matmul` calls: checks, and the custom gradient around the kernels.

The kernels are imported when they are first called, because Mosaic GPU takes longer to import than all of maxlib.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from maxlib.ops.attention.mosaic_gpu.api import HOPPER


def refuses(rows, weights, layout: str, out_dtype: Any, device: tuple[str, str]) -> str | None:
    """Why these kernels cannot multiply these, or None."""
    platform, kind = device
    if platform != "gpu" or not HOPPER.search(kind):
        return f"is for NVIDIA's Hopper (H100, H200, GH200, H800, H20), not for {kind}"
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes rows in bfloat16 or float16, not in {rows.dtype}"
    if out_dtype is not None:
        return "gives rows of their own dtype"
    for name, width in zip(layout, weights.shape, strict=True):
        if name != "E" and width % 64:
            return f"takes widths that are multiples of 64, not {name}={width}"
    return None


def mosaic_gpu(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    layout: str = "EOI",
    out_dtype: None = None,
) -> Num[Array, "M O"]:
    """`tiled`, but that rows which are not finite may spoil the gradient of the next expert's weights, too."""
    M = rows.shape[0]
    rows = jnp.pad(rows, ((0, -M % 8), (0, 0)))  # the memory unit's tiles
    used = (jnp.arange(len(rows)) < rows_per_expert.sum())[:, None]
    # What lies behind the last expert's rows need not be finite, and what a kernel leaves there is anything.
    out: jax.Array = _multiply(jnp.where(used, rows, jnp.zeros_like(rows)), weights, rows_per_expert, layout)  # pyright: ignore[reportAssignmentType]
    return jnp.where(used, out, jnp.zeros_like(out))[:M]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(rows, weights, rows_per_expert, layout):
    from maxlib.ops.grouped_matmul.mosaic_gpu.by_rows import by_rows

    return by_rows(rows, weights.astype(rows.dtype), rows_per_expert, turned=layout == "EOI")


def _forward(rows, weights, rows_per_expert, layout):
    return _multiply(rows, weights, rows_per_expert, layout), (rows, weights, rows_per_expert)


def _backward(layout, residuals, d_out):
    from maxlib.ops.grouped_matmul.mosaic_gpu.by_experts import by_experts
    from maxlib.ops.grouped_matmul.mosaic_gpu.by_rows import by_rows

    rows, weights, rows_per_expert = residuals
    used = (jnp.arange(len(rows)) < rows_per_expert.sum())[:, None]
    d_rows = by_rows(d_out, weights.astype(rows.dtype), rows_per_expert, turned=layout == "EIO")
    d_rows = jnp.where(used, d_rows, jnp.zeros_like(d_rows))
    pair = (d_out, rows) if layout == "EOI" else (rows, d_out)
    return d_rows, by_experts(*pair, rows_per_expert, weights.dtype), None


_multiply.defvjp(_forward, _backward)
