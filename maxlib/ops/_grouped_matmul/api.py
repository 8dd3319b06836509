"""The public grouped matmul and its transpose: they check their arguments and choose an implementation."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from maxlib.hardware import current_device, explained_device
from maxlib.kernels.grouped_matmul.mosaic_gpu import mosaic_gpu
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._cost import register_flops
from maxlib.ops._explanation import Explanation
from maxlib.ops._grouped_matmul import dispatch
from maxlib.ops._grouped_matmul.jax_mosaic_gpu import jax_mosaic_gpu
from maxlib.ops._grouped_matmul.megablox import megablox, megablox_outer, takes
from maxlib.ops._grouped_matmul.ragged_dot import ragged_dot, ragged_outer
from maxlib.ops._grouped_matmul.reference import reference, reference_outer
from maxlib.ops._grouped_matmul.tiled import tiled, tiled_outer
from maxlib.ops._grouped_matmul.tokamax_triton import tokamax

Implementation = Literal["jax_mosaic_gpu", "tokamax", "megablox", "ragged_dot", "tiled", "mosaic_gpu", "reference"]
ExpertWeightOrder = Literal["EOI", "EIO"]
Shaped = jax.Array | jax.ShapeDtypeStruct

_RUN = {
    "jax_mosaic_gpu": jax_mosaic_gpu,
    "tokamax": tokamax,
    "megablox": megablox,
    "ragged_dot": ragged_dot,
    "mosaic_gpu": mosaic_gpu,
    "tiled": tiled,
    "reference": reference,
}
_OUTER = {"megablox": megablox_outer, "ragged_dot": ragged_outer, "tiled": tiled_outer, "reference": reference_outer}


def grouped_matmul(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"] | Any,
    rows_per_expert: Int[Array, " E"],
    *,
    weight_order: ExpertWeightOrder = "EOI",
    out_dtype: Any = None,
    implementation: Implementation | None = None,
) -> Num[Array, "M O"]:
    """Multiplies the rows of each expert by its matrix: `rows[start:end] @ weights[e].T`.

    Computes in the dtype of `rows` and accumulates in float32 (float64 for float64). The gradient of `weights` has
    their dtype, without rounding to another dtype first.

    Args:
      rows: rows sorted by expert.
      weights: one matrix per expert: an array, or an object such as `nn.quantized.QuantizedWeight`, a pytree of arrays
          with a leading axis E whose `weights[...]` are the matrices; it has no gradient.
      rows_per_expert: number of rows of each expert, possibly 0. The sum must be at most M, which cannot be checked
          inside `jit`. Rows beyond the sum give zeros and have zero gradients.
      weight_order: order of the dimensions of `weights`; "EIO" multiplies by `weights[e]` without a transpose.
      out_dtype: dtype of the result. If given, operands are multiplied in their own narrow dtypes (integers are
        accumulated in int32), and there is no gradient. None: the dtype of `rows`.
      implementation: None for the best one that supports the call; `explain_grouped_matmul` shows which one and why.
          "mosaic_gpu" (the default on NVIDIA's Hopper) uses maxlib's kernels, "megablox" (on TPU) and "jax_mosaic_gpu"
          (on NVIDIA's Blackwell) JAX's, the latter but for the gradient of the weights: tokamax's, if it is installed,
          or "tiled". "tokamax" (on other NVIDIA GPUs since Ampere, if it is installed) uses kernels in Triton. "tiled"
          (the default elsewhere) computes tiles of rows in XLA, at a cost proportional to the rows. "ragged_dot" is
          XLA's own. "reference" is the specification, a loop over experts.

    Returns:
      One row of outputs for each row.

    Raises:
      ValueError: when shapes do not agree, `weight_order` or `implementation` is unknown, or the named implementation
          cannot run the call.
    """
    check("grouped_matmul", rows, weights, rows_per_expert, weight_order)
    name = choose("grouped_matmul", rows, weights, weight_order, out_dtype, implementation)
    if name != "tiled" and not isinstance(weights, jax.Array):
        weights = weights[...]
    counts = rows_per_expert.astype(jnp.int32)
    how = {"implementation": name, "weight_order": weight_order, "out_dtype": out_dtype}
    return _grouped_matmul(rows, weights, counts, **how, tiles=tiles_of(name, rows, weights, weight_order))


def grouped_outer(
    d_out: Num[Array, "M O"],
    rows: Num[Array, "M I"],
    rows_per_expert: Int[Array, " E"],
    *,
    implementation: Literal["megablox", "ragged_dot", "tiled", "reference"] | None = None,
) -> Float[Array, "E O I"]:
    """Computes `d_out[start:end].T @ rows[start:end]` for each expert: the gradient of `grouped_matmul`'s weights.

    Operands are multiplied in their own dtypes, including narrow ones. The function is not differentiable.

    Args:
      d_out: gradients of the results, sorted by expert.
      rows: inputs of the forward matmul.
      rows_per_expert: number of rows of each expert.
      implementation: as in `grouped_matmul`.

    Returns:
      A matrix for each expert, in float32 (float64 for float64).

    Raises:
      ValueError: when `d_out` and `rows` differ in their number of rows, or the implementation is unknown.
    """
    if d_out.shape[0] != rows.shape[0]:
        raise ValueError(f"grouped_outer: both must have the same rows, got {d_out.shape} and {rows.shape}")
    name = choose("grouped_outer", rows, None, "EOI", None, implementation)
    # [M, O] and [M, I] -> [E, O, I]: the gradient of weights of this shape.
    weights = jax.ShapeDtypeStruct((len(rows_per_expert), d_out.shape[1], rows.shape[1]), jnp.float32)
    how = {"implementation": name, "tiles": tiles_of(name, rows, weights, "EOI")}
    return _grouped_outer(d_out, rows, rows_per_expert.astype(jnp.int32), **how)


def explain_grouped_matmul(
    rows: Shaped,
    weights: Any,
    *,
    weight_order: ExpertWeightOrder = "EOI",
    out_dtype: Any = None,
    implementation: Implementation | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `grouped_matmul` would run for these arguments, and why.

    Args:
        rows: `M I`, an array or a `jax.ShapeDtypeStruct`.
        weights: `E O I` or `E I O`, likewise.
        weight_order: As in `grouped_matmul`.
        out_dtype: As in `grouped_matmul`.
        implementation: As in `grouped_matmul`.
        device: Platform, and jax's `device_kind` or a short name, such as `("tpu", "v5p")`; default: the device in use.

    Returns:
        An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
        ValueError: No implementation has this name, or the device is unknown.
    """
    device = explained_device(device)
    shapes = f"rows {tuple(rows.shape)} {rows.dtype}, weights {tuple(weights.shape)} {weight_order}"
    reasons = dispatch.refusals(rows, weights, weight_order, out_dtype, device)
    found = dispatch.explain(f"{shapes} on {device[0]} ({device[1]})", reasons, implementation)
    if found.chosen == "megablox" and not takes(rows, out_dtype):
        found = dataclasses.replace(found, reason=f"{found.reason}; for these operands it calls XLA's own, ragged_dot")
    sizes = dispatch.sizes(found.chosen, rows, weights, weight_order, device)
    return dataclasses.replace(found, tiles=sizes)


def choose(op: str, rows: Any, weights: Any, weight_order: str, out_dtype: Any, implementation: str | None) -> str:
    """Returns the implementation to run; weights are None for the transposed matmul.

    Raises:
        ValueError: The named implementation does not exist, or cannot run the call.
    """
    device = current_device()
    found = dispatch.explain(op, dispatch.refusals(rows, weights, weight_order, out_dtype, device), implementation)
    if implementation is None and weights is not None:
        dispatch.say_why(found, device)
    if found.chosen is None:
        raise ValueError(f"{op}: {found.reason}. Pass implementation=None for the best one that can.")
    return found.chosen


def tiles_of(name: str, rows: Any, weights: Any, weight_order: str) -> TileSizes | None:
    """Returns the tile sizes that an implementation runs a call with on this device; None if it has none."""
    found = dispatch.sizes(name, rows, weights, weight_order, current_device())
    return found and found.sizes


def _flops(rows, weights, *rest) -> float:
    """Counts FLOPs as if every row had an expert."""
    return 2.0 * rows.shape[0] * weights.shape[1] * weights.shape[2]


@register_flops(_flops, static=("implementation", "weight_order", "out_dtype", "tiles"))
def _grouped_matmul(rows, weights, rows_per_expert, *, implementation, weight_order, out_dtype, tiles):
    more = {} if tiles is None else {"tiles": tiles}
    return _RUN[implementation](rows, weights, rows_per_expert, weight_order, out_dtype, **more)


def _outer_flops(d_out, rows, *rest) -> float:
    return 2.0 * d_out.size * rows.shape[1]


@register_flops(_outer_flops, static=("implementation", "tiles"))
def _grouped_outer(d_out, rows, rows_per_expert, *, implementation, tiles):
    return _OUTER[implementation](d_out, rows, rows_per_expert, **({} if tiles is None else {"tiles": tiles}))


def check(op: str, rows, weights, rows_per_expert, weight_order) -> None:
    """Checks `weight_order` and the shapes.

    Raises:
      ValueError: when they do not agree.
    """
    if weight_order not in ("EOI", "EIO"):
        raise ValueError(f"{op}: weight_order must be 'EOI' or 'EIO', got {weight_order!r}")
    if rows.ndim != 2 or len(weights.shape) != 3 or rows.shape[1] != weights.shape[weight_order.index("I")]:
        raise ValueError(
            f"{op}: rows must be 'M I' and weights {' '.join(weight_order)!r} with the same I, "
            f"got rows {rows.shape} and weights {weights.shape}"
        )
    if rows_per_expert.shape != weights.shape[:1] or not jnp.issubdtype(rows_per_expert.dtype, jnp.integer):
        raise ValueError(
            f"{op}: rows_per_expert must hold one integer per expert, here {weights.shape[0]}, "
            f"got {rows_per_expert.dtype} {rows_per_expert.shape}"
        )
