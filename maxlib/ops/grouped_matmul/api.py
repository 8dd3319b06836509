"""The public grouped matmul: checks its arguments and chooses an implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.ops.attention.dispatch import current_device
from maxlib.ops.cost import counted
from maxlib.ops.grouped_matmul.ragged_dot import ragged_dot
from maxlib.ops.grouped_matmul.reference import reference
from maxlib.ops.grouped_matmul.tiled import tiled

Implementation = Literal["ragged_dot", "tiled", "reference"]

_RUN = {"ragged_dot": ragged_dot, "tiled": tiled, "reference": reference}
# Elsewhere XLA computes ragged_dot densely: every row with every expert.
_BEST = {"tpu": "ragged_dot"}


def grouped_matmul(
    rows: Float[Array, "M I"],
    weights: Float[Array, "E O I"],
    rows_per_expert: Int[Array, " E"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M O"]:
    """Multiplies each run of rows with its own expert's matrix: `rows[start:end] @ weights[e].T`, the runs one after another.

    `rows` are sorted by expert and `rows_per_expert` counts them; rows beyond the sum of the counts give zeros, and so do their
    gradients. Counts may be zero; their sum must not exceed M, which inside `jit` cannot be checked.
    Computes in the dtype of `rows`, which is also the result's, and accumulates in float32 (float64 for float64).
    The gradient of `weights` has their dtype and is never rounded to another one before.

    implementation: "ragged_dot" (the default on TPU) is XLA's own; "tiled" (the default elsewhere) works through tiles of rows, so
    that its cost follows the rows and not rows times experts; "reference" is the specification, a loop over experts.

    Raises ValueError for shapes that do not fit and for an unknown implementation.
    """
    _check(rows, weights, rows_per_expert)
    name = _BEST.get(current_device()[0], "tiled") if implementation is None else implementation
    if name not in _RUN:
        raise ValueError(f"implementation must be None or one of {sorted(_RUN)}, got {name!r}")
    return _grouped_matmul(rows, weights, rows_per_expert.astype(jnp.int32), implementation=name)


def _flops(rows, weights, rows_per_expert) -> float:
    """As if every row had an expert."""
    return 2.0 * rows.shape[0] * weights.shape[1] * weights.shape[2]


@counted(_flops, static=("implementation",))
def _grouped_matmul(rows, weights, rows_per_expert, *, implementation):
    return _RUN[implementation](rows, weights, rows_per_expert)


def _check(rows, weights, rows_per_expert) -> None:
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[2]:
        raise ValueError(
            f"grouped_matmul: rows must be 'M I' and weights 'E O I' with the same I, "
            f"got rows {rows.shape} and weights {weights.shape}"
        )
    if rows_per_expert.shape != weights.shape[:1] or not jnp.issubdtype(rows_per_expert.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: rows_per_expert must hold one integer per expert, here {weights.shape[0]}, "
            f"got {rows_per_expert.dtype} {rows_per_expert.shape}"
        )
