"""The specification: a loop over experts; each multiplies all rows, with those of other experts set to zero."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


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


def reference_outer(
    d_out: Num[Array, "M O"], rows: Num[Array, "M I"], rows_per_expert: Int[Array, " E"]
) -> Float[Array, "E O I"]:
    """Computes `grouped_outer` by its definition."""
    ends, row = jnp.cumsum(rows_per_expert), jnp.arange(rows.shape[0])
    found = []
    for e in range(rows_per_expert.shape[0]):
        mine = ((row >= ends[e] - rows_per_expert[e]) & (row < ends[e]))[:, None]
        d, x = (jnp.where(mine, a, jnp.zeros_like(a)) for a in (d_out, rows))
        found.append(jnp.einsum("MO,MI->OI", d, x, preferred_element_type=accumulator(rows.dtype)))
    return jnp.stack(found).astype(summed_in(rows.dtype))


def accumulator(dtype: Any) -> Any:
    """Returns the dtype in which products of `dtype` are summed."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.float32 if jnp.dtype(dtype).itemsize == 1 else jnp.promote_types(dtype, jnp.float32)


def summed_in(dtype: Any) -> Any:
    """Returns the floating-point dtype of sums of products of `dtype`."""
    return jnp.promote_types(accumulator(dtype), jnp.float32)
