"""The public grouped matmul: checks its arguments and chooses an implementation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from maxlib.ops.attention.dispatch import current_device
from maxlib.ops.cost import counted
from maxlib.ops.grouped_matmul.mosaic_gpu import mosaic_gpu, refuses
from maxlib.ops.grouped_matmul.ragged_dot import ragged_dot
from maxlib.ops.grouped_matmul.reference import reference
from maxlib.ops.grouped_matmul.tiled import tiled

Implementation = Literal["ragged_dot", "tiled", "mosaic_gpu", "reference"]

_RUN = {"ragged_dot": ragged_dot, "mosaic_gpu": mosaic_gpu, "tiled": tiled, "reference": reference}
# Elsewhere XLA computes ragged_dot densely: every row with every expert.
_BEST = {"tpu": "ragged_dot"}


def grouped_matmul(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Any,
    rows_per_expert: Int[Array, " E"],
    *,
    out_dtype: Any = None,
    implementation: Implementation | None = None,
) -> Num[Array, "M O"]:
    """Multiplies each run of rows with its own expert's matrix: `rows[start:end] @ weights[e].T`, the runs one after another.

    `rows` are sorted by expert and `rows_per_expert` counts them; rows beyond the sum of the counts give zeros, and so do their
    gradients. Counts may be zero; their sum must not exceed M, which inside `jit` cannot be checked.
    Computes in the dtype of `rows`, which is also the result's, and accumulates in float32 (float64 for float64).
    The gradient of `weights` has their dtype and is never rounded to another one before.

    weights: an array, or a pytree of arrays with the leading axis E that has the matrices' `shape` and gives them by `weights[...]`, such as
    `nn.QuantizedWeight`; it has no gradient. out_dtype: operands are multiplied as they are, in whatever narrow dtypes, integers are
    accumulated in int32, and the result has this dtype; it has no gradient either.

    implementation: "ragged_dot" (the default on TPU) is XLA's own; "tiled" (the default elsewhere) works through tiles of rows, so
    that its cost follows the rows and not rows times experts; "mosaic_gpu", by name only until a GPU has run it, is for NVIDIA's Hopper; "reference"
    is the specification, a loop over experts.

    Raises ValueError for shapes that do not fit, for an unknown implementation and for one that cannot run the call.
    """
    _check(rows, weights, rows_per_expert)
    name = _BEST.get(current_device()[0], "tiled") if implementation is None else implementation
    if name not in _RUN:
        raise ValueError(f"implementation must be None or one of {sorted(_RUN)}, got {name!r}")
    if name != "tiled" and not isinstance(weights, jax.Array):
        weights = weights[...]
    if name == "mosaic_gpu" and (reason := refuses(rows, weights, out_dtype, current_device())) is not None:
        raise ValueError(f"grouped_matmul: mosaic_gpu {reason}. Pass implementation=None for the best one that can.")
    counts = rows_per_expert.astype(jnp.int32)
    return _grouped_matmul(rows, weights, counts, implementation=name, out_dtype=out_dtype)


def _flops(rows, weights, *rest) -> float:
    """As if every row had an expert."""
    return 2.0 * rows.shape[0] * rows.shape[1] * weights.shape[1]


@counted(_flops, static=("implementation", "out_dtype"))
def _grouped_matmul(rows, weights, rows_per_expert, *, implementation, out_dtype):
    return _RUN[implementation](rows, weights, rows_per_expert, out_dtype)


def _check(rows, weights, rows_per_expert) -> None:
    if rows.ndim != 2 or len(weights.shape) != 3 or rows.shape[1] != weights.shape[2]:
        raise ValueError(
            f"grouped_matmul: rows must be 'M I' and weights 'E O I' with the same I, "
            f"got rows {rows.shape} and weights {weights.shape}"
        )
    if rows_per_expert.shape != weights.shape[:1] or not jnp.issubdtype(rows_per_expert.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: rows_per_expert must hold one integer per expert, here {weights.shape[0]}, "
            f"got {rows_per_expert.dtype} {rows_per_expert.shape}"
        )
