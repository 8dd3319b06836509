"""Sums over sequences that are packed into rows. Shapes: B rows, T tokens, S sequences of a row.

`segment_ids` number the sequences of a row from 1 to T, with 0 for padding; None stands for one sequence per row. A row
with a larger number, such as the id of a document in a corpus, gives NaN: its sequence has no column.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Segments = Int[Array, "B T"] | None
MAX_LOG_RATIO = 40.0  # e^40 = 2e17, whose square is finite in float32 and bfloat16


def segment_sums(values: Float[Array, "B T"], segment_ids: Segments) -> Float[Array, "B S"]:
    """Sums the values of each sequence; S is 1 without `segment_ids`, else T, the largest possible number of
    sequences.
    """
    if segment_ids is None:
        return jnp.sum(values, axis=1, keepdims=True)  # [B, T] -> [B, 1]
    B, T = values.shape
    # Padding goes to column T, which does not exist and is dropped.
    columns = jnp.where(segment_ids > 0, segment_ids - 1, T)
    sums = jnp.zeros((B, T), values.dtype).at[jnp.arange(B)[:, None], columns].add(values, mode="drop")
    return jnp.where(jnp.max(segment_ids, axis=1, keepdims=True) > T, jnp.nan, sums)


def spread(sums: Float[Array, "B S"], segment_ids: Segments, length: int) -> Float[Array, "B T"]:
    """Broadcasts the value of each sequence to its tokens, of which a row has `length`."""
    if segment_ids is None:
        return jnp.broadcast_to(sums, (sums.shape[0], length))  # [B, 1] -> [B, T]
    return jnp.take_along_axis(sums, jnp.maximum(segment_ids - 1, 0), axis=1)


def is_filled(counts: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Returns 1 for sequences with learned tokens, 0 for those without, and NaN if a segment id is out of range."""
    return jnp.where(counts > 0, 1.0, counts)


def token_counts(mask: Bool[Array, "B T"], segment_ids: Segments) -> Float[Array, "B S"]:
    """Counts the learned tokens of each sequence."""
    return segment_sums(mask.astype(jnp.float32), segment_ids)
