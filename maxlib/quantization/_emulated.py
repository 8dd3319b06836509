"""Operands that are rounded to a few bits and multiplied in full precision, for quantization-aware training.

Weights get the values that `for_inference` would store, so training sees the model that will run. The gradient is
straight-through (Bengio et al. 2013, arXiv:1308.3432).
"""

import jax
import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.quantization._blocks import NVFP4, quantize, rounded
from maxlib.quantization._formats import FOUR_BIT_FLOATS, Format

_E2M1_MAX, _E2M1_EXPONENT = 6.0, 2


def operands(
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
    w = _straight_through(w, _weight(w, outputs, format))
    if format.activations is not None:
        rows = [d for d, letter in enumerate(of_x) if letter in of_y]
        kind = jnp.dtype(format.activations)
        low = qwix.dequantize(qwix.quantize(x.astype(jnp.float32), kind, channelwise_axes=rows))
        x = _straight_through(x, low)
    return x, w


def _straight_through(exact: Array, low: Array) -> Array:
    """Returns `low`, with the gradient of `exact`."""
    return jax.lax.stop_gradient(low.astype(exact.dtype)) + (exact - jax.lax.stop_gradient(exact))


def _weight(w: Array, outputs: list[int], format: Format) -> Array:
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
