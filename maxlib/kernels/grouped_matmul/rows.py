"""Rows sorted by expert: the expert of each row, which rows are used, and the names of the two projections."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

NAMES = "expert_gate", "expert_up"
"""What the two projections of experts are called in policies of `jax.checkpoint`."""


def owners(rows_per_expert: Int[Array, " E"], num_rows: int) -> Int[Array, " M"]:
    """Returns the expert of each row; E for rows beyond the last expert's."""
    # The number of experts whose rows end at or before this row.
    # As comparisons with all of them, in one pass; a search would be a loop of small kernels on a GPU.
    return jnp.searchsorted(jnp.cumsum(rows_per_expert), jnp.arange(num_rows), side="right", method="compare_all")


def only_used(rows: Num[Array, "M D"], rows_per_expert: Int[Array, " E"]) -> Num[Array, "M D"]:
    """Sets rows beyond the last expert's to zero."""
    used = (jnp.arange(len(rows)) < rows_per_expert.sum())[:, None]
    return jnp.where(used, rows, jnp.zeros_like(rows))
