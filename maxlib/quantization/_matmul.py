"""Matmuls of operands that are rounded to fewer bits, and their gradients."""

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
from maxlib.quantization import _blocks, _emulated
from maxlib.quantization._formats import Format


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Matmul (`nn.matmul.Matmul`) that rounds weights and activations, with a scale per row and per output.

    With `format.block`, blocks of both have scales instead (`_blocks`).
    Formats of four bits are emulated (`_emulated`).

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
            return nn.matmul.PlainMatmul().einsum(spec, *_emulated.operands(spec, x, w[...], self.format))
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
            rows, w = _emulated.operands(f"MI,{weight_order}->MEO", rows, w[...], self.format)
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
