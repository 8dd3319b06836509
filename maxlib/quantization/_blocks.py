"""Matmuls of operands with block scales: DeepSeek-V3's FP8 training (arXiv:2412.19437, section 3.3), and NVFP4
training (arXiv:2509.25149).

Activations and gradients have a scale for each line of `block` neighbours along the summed dimension, weights have one
for each square of `block x block`. Scales are powers of two in FP8 and E4M3 numbers in NVFP4, so a rounded value times
its scale is a bfloat16 number: devices without hardware for scaled blocks compute the same products exactly in
bfloat16. In NVFP4 a float32 scale of the whole array multiplies the product.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlib import ops
from maxlib.hardware import current_device, is_blackwell
from maxlib.quantization._formats import Format

NVFP4 = "nvfp4"  # E2M1 numbers, a scale in E4M3 for each block, and a float32 scale of all
_LEAST_EXPONENT = -126  # of a normal float32, and so of a bfloat16
_E2M1, _E2M1_MAX, _E4M3, _E4M3_MAX = "float4_e2m1fn", 6.0, "float8_e4m3fn", 448.0
_HADAMARD = 16  # side of the matrix that rotates the inputs of a weight's gradient


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale", "of_all"], meta_fields=["kind", "sides"]
)
@dataclasses.dataclass(frozen=True)
class Blocks:
    """An array that is rounded block by block: `values * scale * of_all`.

    Attributes:
        values: Rounded values, in float32.
        scale: Scales in float32, one for each block; the last block in a dimension may be partial.
        of_all: Scale of the whole array in float32; None in formats of eight bits, which have none.
        kind: Name of the dtype to which they are rounded, or "nvfp4".
        sides: Length of a block in each dimension.
    """

    values: Float[Array, "..."]
    scale: Float[Array, "..."]
    of_all: Float[Array, ""] | None
    kind: str
    sides: tuple[int, ...]

    @property
    def lane(self) -> int:
        """Returns the number of neighbours that share a scale in the hardware of Blackwell GPUs: MXFP8, or NVFP4."""
        return 16 if self.kind == NVFP4 else 32

    @property
    def dtypes(self) -> tuple[Any, Any]:
        """Returns the dtypes of values and of scales in that hardware."""
        return (_E2M1, _E4M3) if self.kind == NVFP4 else (self.kind, jnp.float8_e8m0fnu)

    def within(self, dtype: Any) -> Float[Array, "..."]:
        """Returns `values * scale`, which is exact in bfloat16."""
        return (self.values * _spread(self.scale, self.sides, self.values.shape)).astype(dtype)

    def restored(self, dtype: Any) -> Float[Array, "..."]:
        """Returns the dequantized array."""
        scale = self.scale if self.of_all is None else self.scale * self.of_all
        return (self.values * _spread(scale, self.sides, self.values.shape)).astype(dtype)

    def lanes(self, dim: int) -> Float[Array, "..."]:
        """Returns a scale for every `lane` neighbours in dimension `dim` and for every index of the others."""
        shape, sides = list(self.values.shape), list(self.sides)
        shape[dim], sides[dim] = shape[dim] // self.lane, max(1, sides[dim] // self.lane)
        return _spread(self.scale, sides, shape)


def quantize(x: Float[Array, "..."], kind: str, sides: tuple[int, ...], *, stochastic: bool = False) -> Blocks:
    """Rounds an array to `kind`, with a scale for each block.

    Args:
        x: The array.
        kind: Name of a dtype of eight bits, or "nvfp4".
        sides: Length of a block in each dimension; at most that of the dimension counts.
        stochastic: True rounds to one of both neighbours at random, so that the mean is exact, but for the largest
            values of a block whose scale was rounded down; only for "nvfp4".
    """
    sides = tuple(min(side, size) for side, size in zip(sides, x.shape, strict=True))
    x = x.astype(jnp.float32)
    largest = _largest(jnp.abs(x), sides)
    if kind == NVFP4:
        return _nvfp4(x, largest, sides, stochastic)
    scale = _scale(largest, kind)
    return Blocks(rounded(x / _spread(scale, sides, x.shape), kind), scale, None, kind, sides)


def _nvfp4(x: Array, largest: Array, sides: tuple[int, ...], stochastic: bool) -> Blocks:
    """Rounds to E2M1 numbers; the largest block gets the largest E4M3 scale."""
    of_all = jnp.max(largest) / (_E2M1_MAX * _E4M3_MAX)
    of_all = jnp.where(of_all > 0, of_all, 1.0)
    scale = rounded(largest / (_E2M1_MAX * of_all), _E4M3)
    scale = jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(x / _spread(scale * of_all, sides, x.shape), -_E2M1_MAX, _E2M1_MAX)
    values = _rounded_at_random(values, _noise(x)) if stochastic else rounded(values, _E2M1)
    return Blocks(values, scale, of_all, NVFP4, sides)


def _rounded_at_random(x: Float[Array, "..."], noise: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds to one of the two E2M1 numbers around x, to the nearer one more often: the mean is x."""
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    return jnp.sign(x) * jnp.floor(size / step + noise) * step


def _noise(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Draws uniform numbers in [0, 1), with a key that is the sum of the bits of x.

    So each step has other numbers, no key is passed through the model, recomputation draws the same ones, and the order
    of the sum, which differs by mesh, does not matter.
    """
    bits = jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), bits), x.shape)


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


def einsum(x: Float[Array, "..."], w: Float[Array, "..."], spec: str, format: Format) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, w)` of rounded blocks.

    Args:
        x: Activations.
        w: The weight.
        spec: One letter for each dimension.
        format: Formats of the operands, with blocks.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    lines = _lines(x, format.activations, of_x, _last(of_x, of_y), format)
    return _product(spec, lines, _squares(w, of_w, of_x, of_y, format), x.dtype)


def einsum_gradients(
    x: Float[Array, "..."], w: Float[Array, "..."], d: Float[Array, "..."], spec: str, format: Format
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Computes the gradients of both operands of `einsum`, whose products are of rounded blocks too.

    Args:
        x: Activations.
        w: The weight.
        d: Gradient of the result.
        spec: As for `einsum`.
        format: Formats of the operands, with blocks.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    # Both products of the backward pass sum over other dimensions, so the lines run along those. Squares do not change.
    # Rounding gradients to nearest would add a bias to every step.
    lines = _lines(d, format.gradients, of_y, _last(of_w, of_x), format, stochastic=True)
    dx = _product(f"{of_y},{of_w}->{of_x}", lines, _squares(w, of_w, of_x, of_y, format), x.dtype)
    along = _last(of_x, of_w)
    if format.gradients == NVFP4 and along:
        d, x = _rotated(d, of_y.index(along)), _rotated(x, of_x.index(along))
    left = _lines(d, format.gradients, of_y, along, format, stochastic=True)
    right = _lines(x, format.activations, of_x, along, format)
    return dx, _product(f"{of_y},{of_x}->{of_w}", left, right, w.dtype)


def _last(letters: str, others: str) -> str:
    """Returns the last of `letters` that is not among `others`; none if there is none."""
    return next((letter for letter in reversed(letters) if letter not in others), "")


def _lines(x: Array, kind: str | None, letters: str, along: str, format: Format, *, stochastic: bool = False) -> Blocks:
    """Rounds activations or gradients with blocks along one dimension."""
    assert kind is not None and format.block is not None
    sides = tuple(format.block if letter in along else 1 for letter in letters)
    return quantize(x, kind, sides, stochastic=stochastic and kind == NVFP4)


def _rotated(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """Multiplies each 16 neighbours of a dimension by a Hadamard matrix with random signs, which spreads outliers.

    The matrix is orthogonal: a product that sums over the dimension of two rotated arrays does not change.
    """
    x = jnp.moveaxis(x.astype(jnp.float32), dim, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _HADAMARD)])
    # [..., T] -> [..., T / 16, 16]
    blocks = x.reshape(*x.shape[:-1], -1, _HADAMARD)
    y = jnp.einsum("...i,ij->...j", blocks, _rotation(), precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(y.reshape(x.shape), -1, dim)


def _rotation() -> np.ndarray:
    """Returns a random sign for each row, times the Hadamard matrix divided by its norm."""
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (_HADAMARD, 1))
    return signs * hadamard(_HADAMARD).astype(np.float32) / np.sqrt(np.float32(_HADAMARD))


def hadamard(size: int) -> Float[np.ndarray, "N N"]:
    """Returns Sylvester's Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _squares(w: Array, of_w: str, of_x: str, of_y: str, format: Format) -> Blocks:
    """Rounds a weight with square blocks over its last summed dimension and its last output dimension."""
    return _lines(w, format.weights, of_w, _last(of_w, of_y) + _last(of_w, of_x), format)


def _product(spec: str, a: Blocks, b: Blocks, dtype: Any) -> Float[Array, "..."]:
    """Computes an einsum of two operands, in scaled blocks if the device has hardware for them."""
    if is_blackwell(current_device()[1]) and _suits_lanes(spec, a, b):
        return scaled_einsum(spec, a, b, dtype)
    if a.of_all is None:
        return jnp.einsum(spec, a.within(dtype), b.within(dtype))
    # CPUs have no product of bfloat16 with a sum in float32.
    narrow = jnp.float32 if current_device()[0] == "cpu" else dtype
    y = jnp.einsum(spec, a.within(narrow), b.within(narrow), preferred_element_type=jnp.float32)
    return _times(y, a, b).astype(dtype)


def _suits_lanes(spec: str, a: Blocks, b: Blocks) -> bool:
    """Returns True if both operands are floats with blocks of whole lanes along the summed dimension."""
    of_a, of_b, out = spec.replace("->", ",").split(",")
    last = _last(of_a, out)
    if not last or not all(jnp.issubdtype(operand.dtypes[0], jnp.floating) for operand in (a, b)):
        return False
    dims = (a, of_a.index(last)), (b, of_b.index(last))
    return all(x.values.shape[d] % x.lane == 0 and x.sides[d] % x.lane == 0 for x, d in dims)


def scaled_einsum(spec: str, a: Blocks, b: Blocks, dtype: Any) -> Float[Array, "..."]:
    """Computes an einsum by `jax.nn.scaled_matmul`, which Blackwell GPUs run in their units for MXFP8 or NVFP4.

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
    sum_dtype = dtype if a.of_all is None else jnp.float32
    y = jax.nn.scaled_matmul(left, right, left_scale, right_scale, preferred_element_type=sum_dtype)
    y = _times(y, a, b).astype(dtype)
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

    of_values, of_scales = x.dtypes
    return flat(x.values.astype(of_values)), flat(x.lanes(letters.index(summed[-1]))).astype(of_scales)


# ----------------------------------------------------------------------------------------------- experts


def grouped(
    rows: Float[Array, "M I"],
    w: Float[Array, "E A B"],
    counts: Int[Array, " E"],
    weight_order: ops.ExpertWeightOrder,
    format: Format,
    *,
    gradients: bool = False,
) -> Float[Array, "M C"]:
    """Multiplies rows, sorted by expert, by the matrices of their experts, both rounded in blocks.

    Products are computed in the dtype of `rows` by the best kernel of `ops.grouped_matmul`.

    Args:
        rows: The rows.
        w: The matrices, `E O I` or `E I O`.
        counts: Rows of each expert.
        weight_order: Dimensions of `w`.
        format: Formats of the operands, with blocks.
        gradients: True if the rows are gradients.
    """
    kind = format.gradients if gradients else format.activations
    lines = _lines(rows, kind, "MI", "I", format, stochastic=gradients)
    squares = _lines(w, format.weights, "EOI", "OI", format)
    y = ops.grouped_matmul(lines.within(w.dtype), squares.within(w.dtype), counts, weight_order=weight_order)
    return _times(y, lines, squares).astype(w.dtype)


def _times(y: Array, a: Blocks, b: Blocks) -> Array:
    """Multiplies a product of two operands by their scales of all, if they have any."""
    return y if a.of_all is None or b.of_all is None else y * (a.of_all * b.of_all)


def grouped_outer(
    d: Float[Array, "M O"],
    rows: Float[Array, "M I"],
    counts: Int[Array, " E"],
    weight_order: ops.ExpertWeightOrder,
    format: Format,
) -> Float[Array, "E A B"]:
    """Computes the gradient of the experts' weights; a line of rows may contain rows of two neighbouring experts.

    Args:
        d: Gradients of the results; 0 in rows of no expert.
        rows: The rows; 0 in those of no expert.
        counts: Rows of each expert.
        weight_order: Dimensions of the gradient.
        format: Formats of the operands, with blocks.
    """
    dtype = d.dtype
    d_lines = _lines(d, format.gradients, "MO", "M", format, stochastic=True)
    x_lines = _lines(rows, format.activations, "MI", "M", format)
    left, right = (d_lines, x_lines) if weight_order == "EOI" else (x_lines, d_lines)
    return _times(ops.grouped_outer(left.within(dtype), right.within(dtype), counts), left, right)
