"""Rows of a table, whose gradients add up in float32 or wider."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.varying import vary_alike


def take_rows(table: Float[Array, "V ..."], ids: Int[Array, "..."], fill_value: float = jnp.nan) -> Float[Array, "..."]:
    """Returns `table[ids]`, and `fill_value` for an id outside of the table, also for a negative one.

    The gradient of a row is the sum over its uses. In bfloat16 a sum of ones stays at 256.
    """
    is_wide = jnp.promote_types(table.dtype, jnp.float32) == table.dtype
    table, ids = vary_alike((table, ids))
    return _taken(table, ids, fill_value) if is_wide else _narrow(table, ids, fill_value)


def _taken(table: Array, ids: Array, fill_value: float) -> Array:
    return table.at[ids].get(mode="fill", fill_value=fill_value, wrap_negative_indices=False)


def _backward(fill_value: float, saved: Any, d: Array) -> tuple[Array, None]:
    table, ids = saved
    sums = jnp.zeros_like(table, dtype=jnp.float32)
    sums = sums.at[ids].add(d.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
    return sums.astype(table.dtype), None


_narrow = jax.custom_vjp(_taken, nondiff_argnums=(2,))
_narrow.defvjp(lambda table, ids, fill_value: (_taken(table, ids, fill_value), (table, ids)), _backward)
