"""Grouped matmuls by XLA alone: the specification, a loop over experts, and XLA's ragged dot.

XLA's ragged dot is a grouped kernel on TPU, and dense (every row with every expert) on other platforms.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from maxlib.kernels.grouped_matmul.rows import unbatched


def reference(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: Any = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul` by its definition, at the cost of multiplying every row by every expert."""
    exact = accumulator(rows.dtype)
    out = jnp.zeros((rows.shape[0], weights.shape[weight_order.index("O")]), exact)
    ends = jnp.cumsum(rows_per_expert)
    row = jnp.arange(rows.shape[0])
    for e in range(weights.shape[0]):
        mine = (row >= ends[e] - rows_per_expert[e]) & (row < ends[e])  # [M]
        w = weights[e] if out_dtype else weights[e].astype(rows.dtype)
        x = jnp.where(mine[:, None], rows, jnp.zeros_like(rows))
        out = out + jnp.einsum(f"MI,{weight_order[1:]}->MO", x, w, preferred_element_type=exact)
    return out.astype(out_dtype or rows.dtype)


def accumulator(dtype: Any) -> Any:
    """Returns the dtype in which products of `dtype` are summed."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.float32 if jnp.dtype(dtype).itemsize == 1 else jnp.promote_types(dtype, jnp.float32)


def summed_in(dtype: Any) -> Any:
    """Returns the floating-point dtype of sums of products of `dtype`."""
    return jnp.promote_types(accumulator(dtype), jnp.float32)


# ---------------------------------------------------------------------------------------------- ragged dot

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def ragged_dot(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: Any = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul` with `jax.lax.ragged_dot_general`."""
    # Request the result's dtype rather than float32: the kernel sums in float32 anyway, and the gradient of the weights
    # gets this dtype too; in float32 it would be twice as large as any other array of a layer. Set rows beyond the last
    # group to zero, because XLA's results there differ between platforms.
    used = (jnp.arange(rows.shape[0]) < rows_per_expert.sum())[:, None]
    rows, dtype = jnp.where(used, rows, jnp.zeros_like(rows)), accumulator(rows.dtype) if out_dtype else rows.dtype
    out: Any = _multiply(
        rows, weights if out_dtype else weights.astype(rows.dtype), rows_per_expert, weight_order, dtype
    )
    return jnp.where(used, out, 0).astype(out_dtype or rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(rows, weights, rows_per_expert, weight_order: str, dtype: Any):
    """Multiplies each row by its expert's matrix, over the dimension of `weights` that `weight_order` calls I."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [weight_order.index("I")]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return _general(rows, weights, rows_per_expert, dimensions, dtype)


def _forward(rows, weights, rows_per_expert, weight_order, dtype):
    return _multiply(rows, weights, rows_per_expert, weight_order, dtype), (rows, weights, rows_per_expert)


def _backward(weight_order, dtype, residuals, d):
    rows, weights, rows_per_expert = residuals
    # dx = dy w swaps the roles of I and O; dw sums the outer products of each expert's rows.
    turned = weight_order.translate(str.maketrans("IO", "OI"))
    pair = (d, rows) if weight_order == "EOI" else (rows, d)
    d_weights = _general(*pair, rows_per_expert, _OUTER, dtype)
    d_rows: Any = _multiply(d, weights, rows_per_expert, turned, dtype)
    return d_rows, d_weights, None


_multiply.defvjp(_forward, _backward)


def _general(rows, others, rows_per_expert, dimensions: Any, dtype: Any) -> Any:
    """Computes `jax.lax.ragged_dot_general`, which TPUs do not support with a batch axis."""
    kernel = functools.partial(
        jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=dimensions, preferred_element_type=dtype
    )
    return unbatched(kernel)(rows, others, rows_per_expert)
