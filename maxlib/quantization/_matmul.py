"""Matmuls of operands that are rounded to fewer bits, and their gradients.

For quantization-aware training, weights are rounded to the values that `for_inference` would store, and multiplied in
full precision, so training sees the model that will run. The gradient is straight-through (Bengio et al. 2013,
arXiv:1308.3432).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib._utils.varying import vary_alike
from maxlib.kernels.grouped_matmul.rows import only_used, owners
from maxlib.quantization import _blocks
from maxlib.quantization._blocks import NVFP4, quantize, rounded
from maxlib.quantization._formats import FOUR_BIT_FLOATS, Format


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Matmul (`nn.matmul.Matmul`) that rounds weights and activations, with a scale per row and per output.

    With `format.block`, blocks of both have scales instead (`_blocks`).
    Formats of four bits are emulated: operands are rounded and multiplied in full precision.

    The gradient is that of the exact product (straight-through). With `format.gradients` the products of the backward
    pass are rounded in the same way, with a scale for each index that is in the result.

    Args:
        format: Formats of the operands.
    """

    format: Format

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        """Computes `einsum(spec, x, w)` of rounded operands."""
        if isinstance(w, nn.quantized.QuantizedWeight):
            assert self.format.activations is not None  # `for_inference` leaves PlainMatmul otherwise
            return nn.matmul.rounding_einsum(spec, x, w, self.format.activations)
        spec = ops.spelled_out(spec, x.ndim)
        if self.format.is_emulated:
            return nn.matmul.PlainMatmul().einsum(spec, *_emulated_operands(spec, x, w[...], self.format))
        return _einsum(x, jnp.asarray(w[...], x.dtype), spec, self.format)

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        """Multiplies rows, sorted by expert, by the matrices of their experts, all rounded."""
        if isinstance(w, nn.quantized.QuantizedWeight):
            return _grouped_product(rows, w.quantized(), rows_per_expert, weight_order, self.format.activations, None)
        if self.format.is_emulated:
            rows, w = _emulated_operands(f"MI,{weight_order}->MEO", rows, w[...], self.format)
            return nn.matmul.PlainMatmul().grouped(rows, w, rows_per_expert, weight_order)
        w = jnp.asarray(w[...], rows.dtype)
        return _grouped(*vary_alike((rows, w, rows_per_expert)), weight_order, self.format)


def format_of(site: Any) -> Format | None:
    """Returns the format of a layer's operands, or in which it stores its weight; None for full precision."""
    if not isinstance(site, nn.Embed) and isinstance(site.matmul, Quantized):
        return site.matmul.format
    if not isinstance(site.w, nn.quantized.QuantizedWeight):
        return None
    return Format(site.w.qtype, group=site.w.group, symmetric=site.w.zeros is None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _einsum(x, w, spec: str, format: Format):
    if format.block is not None:
        return _blocks.einsum(x, w, spec, format)
    return _product(spec, x, w, format.activations, format.weights)


def _einsum_forward(x, w, spec, format):
    return _einsum(x, w, spec, format), (x, w)


def _einsum_backward(spec, format, residuals, d):
    x, w = residuals
    if format.gradients is None:
        return jax.vjp(functools.partial(jnp.einsum, spec), x, w)[1](d)
    if format.block is not None:
        return _blocks.einsum_gradients(x, w, d, spec, format)
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    dx = _product(f"{of_y},{of_w}->{of_x}", d, w, format.gradients, format.weights)
    dw = _product(f"{of_y},{of_x}->{of_w}", d, x, format.gradients, format.activations)
    return dx, dw.astype(w.dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(rows, w, counts, weight_order: ops.ExpertWeightOrder, format: Format):
    if format.block is not None:
        # Rows of no expert are arbitrary, and would affect a scale of all.
        return _blocks.grouped(only_used(rows, counts), w, counts, weight_order, format)
    return _grouped_product(rows, w, counts, weight_order, format.activations, format.weights)


def _grouped_forward(rows, w, counts, weight_order, format):
    return _grouped(rows, w, counts, weight_order, format), (rows, w, counts)


def _grouped_backward(weight_order, format, residuals, d):
    rows, w, counts = residuals
    if format.gradients is None:
        exact = functools.partial(ops.grouped_matmul, rows_per_expert=counts, weight_order=weight_order)
        return *jax.vjp(exact, rows, w)[1](d), None
    back: ops.ExpertWeightOrder = "EIO" if weight_order == "EOI" else "EOI"
    d, rows = (only_used(a, counts) for a in (d, rows))  # the others would affect scales
    if format.block is not None:
        d_rows = _blocks.grouped(d, w, counts, back, format, gradients=True)
        return d_rows, _blocks.grouped_outer(d, rows, counts, weight_order, format).astype(w.dtype), None
    d_rows = _grouped_product(d, w, counts, back, format.gradients, format.weights)
    return d_rows, _grouped_outer(d, rows, counts, weight_order, format).astype(w.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _product(spec: str, a, b, a_type, b_type):
    """Computes the einsum of rounded operands in the dtype of `a`; a `qwix.QArray` is already rounded."""
    letters, out = spec.split("->")
    of_a, of_b = letters.split(",")
    y = qwix.einsum(spec, _rounded(a, a_type, of_a, out), _rounded(b, b_type, of_b, out))
    return y.astype(a.dtype)


def _grouped_product(rows, w, counts, weight_order: ops.ExpertWeightOrder, rows_type, w_type):
    """Multiplies rounded rows by the rounded matrices of their experts: [M, I] and [E, O, I] -> [M, O]."""
    x, w = _rounded(rows, rows_type, "MI", "MO"), _rounded(w, w_type, weight_order, "EO")
    values = x.qvalue.astype(w.qvalue.dtype) if w.qvalue.dtype == rows.dtype else x.qvalue  # of a widened weight
    y = ops.grouped_matmul(values, w.qvalue, counts, weight_order=weight_order, out_dtype=jnp.float32)
    expert = owners(counts, rows.shape[0])
    # [E, O] -> [M, O]: the scales of each row's expert.
    scale = w.scale.squeeze(weight_order.index("I")).at[expert].get(mode="clip")
    used = (expert < counts.shape[0])[:, None]  # rows without an expert are arbitrary and give zeros
    return jnp.where(used, y * x.scale * scale, 0).astype(rows.dtype)


def _grouped_outer(d, rows, counts, weight_order: ops.ExpertWeightOrder, format: Format):
    """Computes the gradient of the experts' weights.

    All experts share the scale of a column, because it must be constant along the summed rows.
    """
    d, x = _rounded(d, format.gradients, "MO", "O"), _rounded(rows, format.activations, "MI", "I")
    left, right = (d, x) if weight_order == "EOI" else (x, d)
    y = ops.grouped_outer(left.qvalue, right.qvalue, counts)
    return y * left.scale.reshape(1, -1, 1) * right.scale.reshape(1, 1, -1)


def _rounded(x, kind: str | None, letters: str, kept: str) -> Any:
    """Rounds `x` to `kind`, with a float32 scale for each index that is in the result."""
    if isinstance(x, qwix.QArray) or kind is None:
        return x
    remaining = [d for d, letter in enumerate(letters) if letter in kept]
    return qwix.quantize(x.astype(jnp.float32), jnp.dtype(kind), channelwise_axes=remaining)


_E2M1_MAX, _E2M1_EXPONENT = 6.0, 2


def _emulated_operands(
    spec: str, x: Float[Array, "..."], w: Float[Array, "..."], format: Format
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns both operands of an einsum, rounded.

    Args:
        spec: The einsum, with a letter for each dimension.
        x: Activations, which get a scale for each index that is in the result.
        w: The weight.
        format: Their formats.
    """
    of_x, of_w, of_y = spec.replace("->", ",").split(",")
    outputs = [d for d, letter in enumerate(of_w) if letter in of_y]
    w = _straight_through(w, _stored_values(w, outputs, format))
    if format.activations is not None:
        rows = [d for d, letter in enumerate(of_x) if letter in of_y]
        kind = jnp.dtype(format.activations)
        low = qwix.dequantize(qwix.quantize(x.astype(jnp.float32), kind, channelwise_axes=rows))
        x = _straight_through(x, low)
    return x, w


def _straight_through(exact: Array, low: Array) -> Array:
    """Returns `low`, with the gradient of `exact`."""
    return jax.lax.stop_gradient(low.astype(exact.dtype)) + (exact - jax.lax.stop_gradient(exact))


def _stored_values(w: Array, outputs: list[int], format: Format) -> Array:
    w = jax.lax.stop_gradient(w)
    if format.weights in FOUR_BIT_FLOATS:
        return four_bit_floats(w, format.weights)
    return nn.quantized.QuantizedWeight(
        w,
        qtype=format.weights,
        outputs=outputs,
        group=format.group,
        axes=("",) * w.ndim,
        symmetric=format.symmetric,
    )[...]


def four_bit_floats(w: Float[Array, "..."], kind: str) -> Float[Array, "..."]:
    """Rounds to E2M1 numbers with a scale for each group of the last dimension.

    NVFP4 has E4M3 scales of 16 numbers and a float32 scale of all; MXFP4 powers of two of 32 numbers (OCP Microscaling
    1.0).

    Args:
        w: The numbers.
        kind: "nvfp4" or "mxfp4".
    """
    group = FOUR_BIT_FLOATS[kind]
    if kind == NVFP4:
        return quantize(w, kind, (1,) * (w.ndim - 1) + (group,)).restored(jnp.float32)
    # [..., I] -> [..., G, g]
    groups = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, group)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    exponent = jnp.frexp(largest)[1] - 1 - _E2M1_EXPONENT  # of the largest power of two in the group
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, -126))
    numbers = jnp.clip(groups / scale, -_E2M1_MAX, _E2M1_MAX)
    return (rounded(numbers, "float4_e2m1fn") * scale).reshape(w.shape)
