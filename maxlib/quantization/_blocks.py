"""Matmuls of operands with block scales, as in DeepSeek-V3's FP8 training (arXiv:2412.19437, section 3.3).

Activations and gradients have a scale for each line of `block` neighbours along the summed dimension, weights have one
for each square of `block x block`. Scales are powers of two, so a rounded value times its scale is a bfloat16 number:
devices without hardware for scaled blocks compute the same products exactly in bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.hardware import current_device, is_blackwell
from maxlib.quantization._formats import Format

LANE = 32  # neighbours that share a scale in the MXFP8 hardware of Blackwell GPUs
_LEAST_EXPONENT = -126  # of a normal float32, and so of a bfloat16


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["kind", "sides"])
@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array that is rounded block by block: `values * scale`.

    Attributes:
        values: Rounded values, in float32.
        scale: float32 powers of two, one for each block; the last block in a dimension may be partial.
        kind: Name of the dtype to which they are rounded.
        sides: Length of a block in each dimension.
    """

    values: Float[Array, "..."]
    scale: Float[Array, "..."]
    kind: str
    sides: tuple[int, ...]

    def restored(self, dtype: Any) -> Float[Array, "..."]:
        """Returns the dequantized array."""
        return (self.values * _spread(self.scale, self.sides, self.values.shape)).astype(dtype)

    def lanes(self, dim: int) -> Float[Array, "..."]:
        """Returns a scale for every `LANE` neighbours in dimension `dim` and for every index of the others."""
        shape, sides = list(self.values.shape), list(self.sides)
        shape[dim], sides[dim] = shape[dim] // LANE, max(1, sides[dim] // LANE)
        return _spread(self.scale, sides, shape)


def quantize(x: Float[Array, "..."], kind: str, sides: tuple[int, ...]) -> Blocks:
    """Rounds an array to `kind`, with a scale for each block.

    Args:
        x: The array.
        kind: Name of a dtype of eight bits.
        sides: Length of a block in each dimension; at most that of the dimension counts.
    """
    sides = tuple(min(side, size) for side, size in zip(sides, x.shape, strict=True))
    x = x.astype(jnp.float32)
    scale = _scale(_largest(jnp.abs(x), sides), kind)
    return Blocks(rounded(x / _spread(scale, sides, x.shape), kind), scale, kind, sides)


def rounded(x: Float[Array, "..."], kind: str) -> Float[Array, "..."]:
    """Rounds to the values of `kind`, in float32."""
    # Round by arithmetic, because XLA for GPUs removes a conversion to eight bits and back.
    if jnp.issubdtype(kind, jnp.integer):
        return jnp.round(x)
    info = jnp.finfo(kind)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    step = float(info.smallest_subnormal)  # the distance of the smallest numbers, which have fewer bits
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x / step) * step, normal)


def _largest(x: Float[Array, "..."], sides: Sequence[int]) -> Float[Array, "..."]:
    """Returns the largest element of each block."""
    padded = jnp.pad(x, [(0, -size % side) for size, side in zip(x.shape, sides, strict=True)])
    # [M, K] -> [M / 1, 1, K / 128, 128] -> [M, K / 128], for example
    pairs = [(size // side, side) for size, side in zip(padded.shape, sides, strict=True)]
    return padded.reshape([n for pair in pairs for n in pair]).max(axis=tuple(range(1, 2 * x.ndim, 2)))


def _scale(largest: Float[Array, "..."], kind: str) -> Float[Array, "..."]:
    """Returns the smallest power of two by which to divide `largest` so that it fits into `kind`."""
    info = jnp.iinfo(kind) if jnp.issubdtype(kind, jnp.integer) else jnp.finfo(kind)
    mantissa, exponent = jnp.frexp(largest / float(info.max))  # mantissa in [0.5, 1)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, _LEAST_EXPONENT))


def _spread(scale: Float[Array, "..."], sides: Sequence[int], shape: Sequence[int]) -> Float[Array, "..."]:
    """Repeats scales over their blocks, up to `shape`."""
    for dim, (side, size) in enumerate(zip(sides, shape, strict=True)):
        if side > 1:
            scale = jax.lax.slice_in_dim(jnp.repeat(scale, side, axis=dim), 0, size, axis=dim)
    return scale


# ------------------------------------------------------------------------------------------------- dense


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def einsum(x: Float[Array, "..."], w: Float[Array, "..."], spec: str, format: Format) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, w)` of rounded blocks; the gradient is straight-through, as `format` says.

    Args:
        x: Activations.
        w: The weight.
        spec: One letter for each dimension.
        format: Formats of the operands, with blocks.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    lines = _lines(x, format.activations, of_x, _last(of_x, of_y), format)
    return _product(spec, lines, _squares(w, of_w, of_x, of_y, format), x.dtype)


def _forward(x, w, spec, format):
    return einsum(x, w, spec, format), (x, w)


def _backward(spec, format, residuals, d):
    x, w = residuals
    if format.gradients is None:
        return jax.vjp(lambda x, w: jnp.einsum(spec, x, w), x, w)[1](d)
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    # Both products of the backward pass sum over other dimensions, so the lines run along those. Squares do not change.
    lines = _lines(d, format.gradients, of_y, _last(of_w, of_x), format)
    dx = _product(f"{of_y},{of_w}->{of_x}", lines, _squares(w, of_w, of_x, of_y, format), x.dtype)
    along = _last(of_x, of_w)
    left = _lines(d, format.gradients, of_y, along, format)
    right = _lines(x, format.activations, of_x, along, format)
    return dx, _product(f"{of_y},{of_x}->{of_w}", left, right, w.dtype)


einsum.defvjp(_forward, _backward)


def _last(letters: str, others: str) -> str:
    """Returns the last of `letters` that is not among `others`; none if there is none."""
    return next((letter for letter in reversed(letters) if letter not in others), "")


def _lines(x: Array, kind: Any, letters: str, along: str, format: Format) -> Blocks:
    """Rounds activations or gradients with blocks along one dimension."""
    return quantize(x, kind, tuple(_side(format) if letter in along else 1 for letter in letters))


def _squares(w: Array, of_w: str, of_x: str, of_y: str, format: Format) -> Blocks:
    """Rounds a weight with square blocks over its last summed dimension and its last output dimension."""
    return _lines(w, format.weights, of_w, _last(of_w, of_y) + _last(of_w, of_x), format)


def _side(format: Format) -> int:
    assert format.block is not None
    return format.block


def _product(spec: str, a: Blocks, b: Blocks, dtype: Any) -> Float[Array, "..."]:
    """Computes an einsum of two operands, in scaled blocks if the device has hardware for them."""
    if is_blackwell(current_device()[1]) and _suits_lanes(spec, a, b):
        return scaled_einsum(spec, a, b, dtype)
    return jnp.einsum(spec, a.restored(dtype), b.restored(dtype))


def _suits_lanes(spec: str, a: Blocks, b: Blocks) -> bool:
    """Returns True if both operands have 8-bit floats and blocks of whole lanes along the summed dimension."""
    of_a, of_b, out = spec.replace("->", ",").split(",")
    last = _last(of_a, out)
    if not last or not all(jnp.issubdtype(operand.kind, jnp.floating) for operand in (a, b)):
        return False
    dims = (a, of_a.index(last)), (b, of_b.index(last))
    return all(operand.values.shape[d] % LANE == 0 and operand.sides[d] % LANE == 0 for operand, d in dims)


def scaled_einsum(spec: str, a: Blocks, b: Blocks, dtype: Any) -> Float[Array, "..."]:
    """Computes an einsum by `jax.nn.scaled_matmul`, which Blackwell GPUs run in their units for MXFP8.

    Args:
        spec: The einsum; its last summed dimension has blocks of whole lanes in both operands.
        a: First operand.
        b: Second operand.
        dtype: Dtype of the result.
    """
    of_a, of_b, out = spec.replace("->", ",").split(",")
    both = [letter for letter in of_a if letter in of_b]
    batch = "".join(letter for letter in both if letter in out)
    summed = "".join(letter for letter in both if letter not in out)
    rows, columns = ("".join(letter for letter in of if letter not in both) for of in (of_a, of_b))
    left, left_scale = _matrices(a, of_a, batch, rows, summed)
    right, right_scale = _matrices(b, of_b, batch, columns, summed)
    y = jax.nn.scaled_matmul(left, right, left_scale, right_scale, preferred_element_type=dtype)
    sizes = dict(zip(of_a + of_b, a.values.shape + b.values.shape, strict=True))
    y = y.reshape([sizes[letter] for letter in batch + rows + columns])
    return jnp.einsum(f"{batch + rows + columns}->{out}", y)


def _matrices(x: Blocks, letters: str, batch: str, kept: str, summed: str) -> tuple[Array, Array]:
    """Returns values `batch kept summed` and a scale for every lane of them, each as three dimensions."""
    order = [letters.index(letter) for letter in batch + kept + summed]

    def size(names):
        return math.prod(x.values.shape[letters.index(letter)] for letter in names)

    def flat(y):
        return y.transpose(order).reshape(size(batch), size(kept), -1)

    return flat(x.values.astype(x.kind)), flat(x.lanes(letters.index(summed[-1]))).astype(jnp.float8_e8m0fnu)


# ----------------------------------------------------------------------------------------------- experts


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped(rows, w, counts, weight_order: ops.ExpertWeightOrder, format: Format):
    """Multiplies rows, sorted by expert, by the matrices of their experts, both rounded in blocks.

    Products are computed in the dtype of `rows` by the best kernel of `ops.grouped_matmul`.

    Args:
        rows: `M I`.
        w: `E O I` or `E I O`.
        counts: Rows of each expert.
        weight_order: Dimensions of `w`.
        format: Formats of the operands, with blocks.
    """
    lines = _lines(rows, format.activations, "MI", "I", format).restored(rows.dtype)
    return ops.grouped_matmul(lines, _experts(w, weight_order, format), counts, weight_order=weight_order)


def _grouped_forward(rows, w, counts, weight_order, format):
    return grouped(rows, w, counts, weight_order, format), (rows, w, counts)


def _grouped_backward(weight_order, format, residuals, d):
    rows, w, counts = residuals
    if format.gradients is None:
        return *jax.vjp(lambda rows, w: ops.grouped_matmul(rows, w, counts, weight_order=weight_order), rows, w)[1](
            d
        ), None
    back: ops.ExpertWeightOrder = "EIO" if weight_order == "EOI" else "EOI"
    lines = _lines(d, format.gradients, "MO", "O", format).restored(d.dtype)
    d_rows = ops.grouped_matmul(lines, _experts(w, weight_order, format), counts, weight_order=back)
    return d_rows, _outer(d, rows, counts, weight_order, format).astype(w.dtype), None


grouped.defvjp(_grouped_forward, _grouped_backward)


def _experts(w, weight_order: ops.ExpertWeightOrder, format: Format):
    return _lines(w, format.weights, weight_order, "OI", format).restored(w.dtype)


def _outer(d, rows, counts, weight_order: ops.ExpertWeightOrder, format: Format):
    """Computes the gradient of the experts' weights; a line of rows may contain rows of two neighbouring experts."""
    used = (jnp.arange(len(rows)) < counts.sum())[:, None]  # other rows are arbitrary and would affect scales
    d, rows = (jnp.where(used, a, jnp.zeros_like(a)) for a in (d, rows))
    d = _lines(d, format.gradients, "MO", "M", format).restored(d.dtype)
    rows = _lines(rows, format.activations, "MI", "M", format).restored(rows.dtype)
    left, right = (d, rows) if weight_order == "EOI" else (rows, d)
    return ops.grouped_outer(left, right, counts)
