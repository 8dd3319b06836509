"""The public grouped matmul and its transpose: their calls, their kernels, and the choice between them."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from maxlib.hardware import current_device, explained_device, is_hopper
from maxlib.kernels.grouped_matmul.mosaic_gpu import mosaic_gpu
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import grouped_tiles
from maxlib.ops._axes import check_axes, require
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice, Explanation, Kernel, Op, Shaped
from maxlib.ops._grouped_matmul import megablox, tokamax_triton
from maxlib.ops._grouped_matmul.call import GroupedCall
from maxlib.ops._grouped_matmul.tiled import tiled, tiled_outer, tiled_tiles
from maxlib.ops._grouped_matmul.xla import ragged_dot, reference

ExpertWeightOrder = Literal["EOI", "EIO"]


def grouped_matmul(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"] | Any,
    rows_per_expert: Int[Array, " E"],
    *,
    weight_order: ExpertWeightOrder = "EOI",
    out_dtype: Any = None,
    zero_rest: bool = True,
    implementation: str | None = None,
) -> Num[Array, "M O"]:
    """Multiplies the rows of each expert by its matrix: `rows[start:end] @ weights[e].T`.

    Computes in the dtype of `rows` and accumulates in float32 (float64 for float64). The gradient of `weights` has
    their dtype, without rounding to another dtype first.

    Args:
        rows: Rows sorted by expert.
        weights: One matrix per expert: an array, or an object such as `nn.quantized.QuantizedWeight`, a pytree of
            arrays with a leading axis E whose `weights[...]` are the matrices; it has no gradient.
        rows_per_expert: Number of rows of each expert, possibly 0. The sum must be at most M, which cannot be checked
            inside `jit`. Rows beyond the sum give zeros and have zero gradients.
        weight_order: Order of the dimensions of `weights`; "EIO" multiplies by `weights[e]` without a transpose.
        out_dtype: Dtype of the result. If given, operands are multiplied in their own narrow dtypes (integers are
            accumulated in int32), and there is no gradient. None: the dtype of `rows`.
        zero_rest: False leaves rows beyond the sum, and their gradients, undefined (they may be NaN) where that spares
            a pass over the results.
        implementation: None for the best one that supports the call; `explain_grouped_matmul` shows which one and why.
            "mosaic_gpu" (the default on NVIDIA's Hopper) uses maxlib's kernels, "megablox" (on TPU) JAX's, and
            "tokamax" (on other NVIDIA GPUs since Ampere, if it is installed) kernels in Triton. "ragged_dot" is XLA's
            own, on TPU the default for operands of 8 bits. "tiled" (the default elsewhere) computes tiles of rows in
            XLA, at a cost proportional to the rows. "reference" is the specification, a loop over experts.

    Returns:
        One row of outputs for each row.

    Raises:
        ValueError: When shapes do not agree, `weight_order` or `implementation` is unknown, or the named implementation
            cannot run the call.
    """
    check_shapes("grouped_matmul", rows, weights, rows_per_expert, weight_order)
    call = describe(rows, weights, weight_order, out_dtype)
    choice = GROUPED_MATMUL.choose(call, implementation)
    if choice.kernel != "tiled" and not isinstance(weights, jax.Array):
        weights = weights[...]
    counts = rows_per_expert.astype(jnp.int32)
    return _grouped_matmul(
        rows, weights, counts, weight_order=weight_order, out_dtype=out_dtype, zero_rest=zero_rest, choice=choice
    )


def grouped_outer(
    d_out: Num[Array, "M O"],
    rows: Num[Array, "M I"],
    rows_per_expert: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "E O I"]:
    """Computes `d_out[start:end].T @ rows[start:end]` for each expert: the gradient of `grouped_matmul`'s weights.

    Operands are multiplied in their own dtypes, including narrow ones. The function is not differentiable.

    Args:
        d_out: Gradients of the results, sorted by expert.
        rows: Inputs of the forward matmul.
        rows_per_expert: Number of rows of each expert.
        implementation: "megablox" (the default on TPU), "tiled" (elsewhere) or None.

    Returns:
        A matrix for each expert, in float32 (float64 for float64).

    Raises:
        ValueError: When `d_out` and `rows` differ in their number of rows, or the implementation is unknown.
    """
    if d_out.shape[0] != rows.shape[0]:
        raise ValueError(f"grouped_outer: both must have the same rows, got {d_out.shape} and {rows.shape}")
    # [M, O] and [M, I] -> [E, O, I]: the gradient of weights of this shape.
    weights = jax.ShapeDtypeStruct((len(rows_per_expert), d_out.shape[1], rows.shape[1]), jnp.float32)
    choice = GROUPED_OUTER.choose(describe(rows, weights, "EOI", None), implementation)
    return _grouped_outer(d_out, rows, rows_per_expert.astype(jnp.int32), choice=choice)


def explain_grouped_matmul(
    rows: Shaped,
    weights: Any,
    *,
    weight_order: ExpertWeightOrder = "EOI",
    out_dtype: Any = None,
    implementation: str | None = None,
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
    call = describe(rows, weights, weight_order, out_dtype, explained_device(device))
    return GROUPED_MATMUL.explain(call, implementation)


def describe(
    rows: Any, weights: Any, weight_order: str, out_dtype: Any, device: tuple[str, str] | None = None
) -> GroupedCall:
    """Returns the properties of a call that decide its kernel.

    Args:
        rows: `M I`, or its shape and dtype.
        weights: `E O I` or `E I O`, or their shape.
        weight_order: The dimensions of `weights`.
        out_dtype: Dtype of the result of narrow operands, or None.
        device: Platform and kind of the device; None for the device in use.
    """
    platform, device_kind = device or current_device()
    E, O, I = (weights.shape[weight_order.index(axis)] for axis in "EOI")
    return GroupedCall(
        rows=rows.shape[0],
        experts=E,
        inputs=I,
        outputs=O,
        weight_order=weight_order,
        dtype=str(rows.dtype),
        weight_dtype=str(getattr(weights, "dtype", rows.dtype)),
        out_dtype=None if out_dtype is None else str(jnp.dtype(out_dtype)),
        is_array=isinstance(weights, (jax.Array, jax.ShapeDtypeStruct)),
        platform=platform,
        device_kind=device_kind,
    )


def _flops(rows, weights, *rest) -> float:
    """Counts FLOPs as if every row had an expert."""
    return 2.0 * rows.shape[0] * weights.shape[1] * weights.shape[2]


@register_flops(_flops, static=("weight_order", "out_dtype", "zero_rest", "choice"), name="grouped_matmul")
def _grouped_matmul(rows, weights, rows_per_expert, *, weight_order, out_dtype, zero_rest, choice: Choice):
    run, options = GROUPED_MATMUL[choice.kernel].run, choice.options
    if choice.kernel == "megablox":  # the others write all rows
        options |= {"zero_rest": zero_rest}
    return run(rows, weights, rows_per_expert, weight_order, out_dtype, **options)


def _outer_flops(d_out, rows, *rest) -> float:
    return 2.0 * d_out.size * rows.shape[1]


@register_flops(_outer_flops, static=("choice",), name="grouped_outer")
def _grouped_outer(d_out, rows, rows_per_expert, *, choice: Choice):
    return GROUPED_OUTER[choice.kernel].run(d_out, rows, rows_per_expert, **choice.options)


def check_shapes(op: str, rows, weights, rows_per_expert, weight_order) -> None:
    """Checks `weight_order` and the shapes.

    Raises:
        ValueError: When they do not agree.
    """
    require(op, weight_order in ("EOI", "EIO"), "weight_order must be 'EOI' or 'EIO'", repr(weight_order))
    counts = rows_per_expert
    check_axes(op, rows=(rows, "M I"), weights=(weights, " ".join(weight_order)), rows_per_expert=(counts, "E"))
    require(op, jnp.issubdtype(counts.dtype, jnp.integer), "rows_per_expert must be integers", counts.dtype)


# ---------------------------------------------------------------------------------------------- the kernels


def _hopper_refuses(call: GroupedCall) -> str | None:
    """Returns the reason why maxlib's kernels for Hopper cannot run a call, or None."""
    if not is_hopper(call.device_kind):
        return f"is for NVIDIA's Hopper (H100, H200, GH200, H800, H20), not for {call.device_kind}"
    if reason := call.refuses_operands():
        return reason
    for axis, width in (("I", call.inputs), ("O", call.outputs)):
        if width % 64:
            return f"takes widths that are multiples of 64, not {axis}={width}"
    return None


GPU, TPU = frozenset({"gpu"}), frozenset({"tpu"})

GROUPED_MATMUL = Op(
    "grouped_matmul",
    (
        Kernel(
            "mosaic_gpu",
            mosaic_gpu,
            "maxlib's kernels for NVIDIA's Hopper in both passes",
            GPU,
            refuses=_hopper_refuses,
            tiles=lambda call: grouped_tiles(call.inputs, call.outputs),
        ),
        Kernel(
            "tokamax",
            tokamax_triton.tokamax,
            "tokamax's kernels in Triton for NVIDIA's GPUs since Ampere",
            GPU,
            refuses=tokamax_triton.refuses,
            tiles=lambda call: tokamax_triton.TritonTiles(),
        ),
        Kernel(
            "megablox",
            megablox.megablox,
            "JAX's TPU kernels in both passes",
            TPU,
            refuses=megablox.refuses,
            tiles=megablox.default_tiles,
        ),
        # For narrow operands. libtpu 0.0.42 multiplies every row by every expert in its gradient of the weights, and so
        # does XLA on other platforms.
        Kernel("ragged_dot", ragged_dot, "XLA's own for TPUs, also for operands of 8 bits", TPU),
        Kernel(
            "tiled",
            tiled,
            "tiles of rows in XLA, at a cost proportional to the rows",
            tiles=lambda call: tiled_tiles(call.rows, call.experts),
        ),
        Kernel("reference", reference, "the reference, a loop over experts", by_name="it is the specification"),
    ),
    fused=("mosaic_gpu", "tokamax"),
)

GROUPED_OUTER = Op(
    "grouped_outer",
    (
        Kernel(
            "megablox",
            megablox.megablox_outer,
            "JAX's TPU kernel",
            TPU,
            tiles=megablox.default_tiles,
        ),
        Kernel(
            "tiled",
            tiled_outer,
            "tiles of rows in XLA",
            tiles=lambda call: tiled_tiles(call.rows, call.experts),
        ),
    ),
)
