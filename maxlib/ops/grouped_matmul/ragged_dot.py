"""XLA's ragged dot: a grouped kernel on TPU, dense (every row with every expert) on other platforms."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from maxlib.ops.grouped_matmul.reference import accumulator, summed_in

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def ragged_dot(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    layout: str = "EOI",
    out_dtype: Any = None,
) -> Num[Array, "M O"]:
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [layout.index("I")]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    # The result's own dtype, not float32: the kernel sums in float32 anyway, and the gradient of the weights takes this
    # dtype too, which in float32 was twice as large as anything else of a layer. What XLA leaves in rows beyond the
    # last group differs between platforms.
    used = (jnp.arange(rows.shape[0]) < rows_per_expert.sum())[:, None]
    out = jax.lax.ragged_dot_general(
        jnp.where(used, rows, jnp.zeros_like(rows)),
        weights if out_dtype else weights.astype(rows.dtype),
        rows_per_expert,
        dimensions,
        preferred_element_type=accumulator(rows.dtype) if out_dtype else rows.dtype,
    )
    return jnp.where(used, out, 0).astype(out_dtype or rows.dtype)


def ragged_outer(
    d_out: Num[Array, "M O"], rows: Num[Array, "M I"], rows_per_expert: Int[Array, " E"]
) -> Float[Array, "E O I"]:
    used = (jnp.arange(rows.shape[0]) < rows_per_expert.sum())[:, None]
    d, x = (jnp.where(used, a, jnp.zeros_like(a)) for a in (d_out, rows))
    out = jax.lax.ragged_dot_general(d, x, rows_per_expert, _OUTER, preferred_element_type=accumulator(rows.dtype))
    return out.astype(summed_in(rows.dtype))
