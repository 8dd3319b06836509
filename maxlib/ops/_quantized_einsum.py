"""Products with a weight that is stored in few bits, with or without rounded activations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float

from maxlib.hardware import chip_of, explained_device
from maxlib.ops._dispatch import Call, Explanation, Kernel, Op, Shaped

Multiply = Callable[[str, Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedCall(Call):
    """The properties of a call that decide its kernel; `dtype` is that of the activations before rounding.

    Args:
        spec: The einsum.
        qtype: Type of the weight's values.
        group: Number of inputs that share a scale; None for one scale for each output.
        sums_scales: True if the einsum sums over a dimension in which scales differ, as an absorbed projection does.
        has_zeros: True if the weight has zero points.
        activations: Type to which activations are rounded; None does not round them.
    """

    spec: str
    qtype: str
    group: int | None
    sums_scales: bool
    has_zeros: bool
    activations: str | None

    def __str__(self) -> str:
        scales = "an output" if self.group is None else f"{self.group} inputs"
        rounded = "" if self.activations is None else f" rounded to {self.activations}"
        weight = f"{self.qtype} with a scale for {scales}"
        return f"{self.spec} of {self.dtype}{rounded} and {weight} on {self.platform} ({self.device_kind})"

    def refuses_rounding(self) -> str | None:
        """Returns the reason why a kernel without rounded activations cannot run it, or None."""
        return None if self.activations is None else "does not round activations"


def quantized_einsum(
    spec: str,
    x: Float[Array, "..."],
    weight: Any,
    *,
    activations: str | None = None,
    implementation: str | None = None,
    multiply: Multiply = jnp.einsum,
) -> Float[Array, "..."]:
    """Computes `einsum(spec, x, weight)` in the dtype of `x`, with a weight that is stored in few bits.

    Args:
        spec: Einsum of activations and weight, such as `"...D,NHD->...NH"`.
        x: Activations.
        weight: A `nn.quantized.QuantizedWeight`.
        activations: Type to which activations are rounded, with a scale for each index that is in the result; None does
            not round them.
        implementation: None for the best one; `explain_quantized_einsum` shows which one and why.
        multiply: The einsum of two arrays in the dtype of `x`, where no narrower one is chosen.
    """
    kernel = QUANTIZED_EINSUM.choose(_describe(spec, x, weight, activations, None), implementation).kernel
    return QUANTIZED_EINSUM[kernel].run(spec, x, weight, activations, multiply)


def explain_quantized_einsum(
    spec: str,
    x: Shaped,
    weight: Any,
    *,
    activations: str | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `quantized_einsum` would run for these arguments, and why.

    On CPUs `inference.Generator` replaces such weights once, so that no step casts them.

    Args:
        spec: As in `quantized_einsum`.
        x: Activations, an array or a `jax.ShapeDtypeStruct`.
        weight: As in `quantized_einsum`.
        activations: As in `quantized_einsum`.
        implementation: As in `quantized_einsum`.
        device: Platform, and jax's `device_kind` or a short name, such as `("tpu", "v5p")`; default: the device in use.

    Raises:
        ValueError: No implementation has this name, or the device is unknown.
    """
    return QUANTIZED_EINSUM.explain(_describe(spec, x, weight, activations, device), implementation)


def _describe(spec: str, x: Any, weight: Any, activations: str | None, device: Any) -> QuantizedCall:
    platform, kind = explained_device(device)
    _, of_w, of_y = spec.replace("->", ",").split(",")
    sizes = dict(zip(of_w, weight.scale.get_value().shape, strict=True))
    return QuantizedCall(
        dtype=jnp.dtype(x.dtype).name,
        platform=platform,
        device_kind=kind,
        spec=spec,
        qtype=weight.qtype,
        group=weight.group,
        sums_scales=any(size > 1 for letter, size in sizes.items() if letter not in of_y),
        has_zeros=weight.zeros is not None,
        activations=activations,
    )


def _narrow(spec: str, x: Array, weight: Any, activations: str, multiply: Multiply) -> Array:
    spec = spelled_out(spec, x.ndim)
    return qwix.einsum(spec, _rounded(spec, x, activations), weight.quantized()).astype(x.dtype)


def _widened(spec: str, x: Array, weight: Any, activations: str, multiply: Multiply) -> Array:
    full = spelled_out(spec, x.ndim)
    low = _rounded(full, x, activations)
    y = multiply(spec, low.qvalue.astype(x.dtype), weight.quantized().qvalue.astype(x.dtype))
    of_x, of_w, of_y = full.replace("->", ",").split(",")
    return (y * _beside(low.scale, of_x, of_y) * _beside(weight.quantized().scale, of_w, of_y)).astype(x.dtype)


def _scaled_after(spec: str, x: Array, weight: Any, activations: None, multiply: Multiply) -> Array:
    low = weight.quantized()
    y = multiply(spec, x, low.qvalue.astype(x.dtype))
    _, of_w, of_y = spelled_out(spec, x.ndim).replace("->", ",").split(",")
    return (y * _beside(low.scale, of_w, of_y)).astype(x.dtype)


def _dequantized(spec: str, x: Array, weight: Any, activations: None, multiply: Multiply) -> Array:
    return multiply(spec, x, weight.matrix(x.dtype))


def _rounded(spec: str, x: Array, kind: str) -> Any:
    """Rounds activations, with a float32 scale for each index that is in the result."""
    of_x, _, of_y = spec.replace("->", ",").split(",")
    remaining = [d for d, letter in enumerate(of_x) if letter in of_y]
    return qwix.quantize(x.astype(jnp.float32), jnp.dtype(kind), channelwise_axes=remaining)


def _beside(scale: Array, letters: str, of_y: str) -> Array:
    """Arranges the scales of an operand beside the result: size 1 in the dimensions that it does not have."""
    order = [letters.index(letter) for letter in of_y if letter in letters]
    summed = [d for d in range(len(letters)) if d not in order]  # of size 1
    shape = [scale.shape[letters.index(letter)] if letter in letters else 1 for letter in of_y]
    return scale.transpose(*order, *summed).reshape(shape)


def spelled_out(spec: str, ndim: int) -> str:
    """Returns `spec` with letters instead of an ellipsis in the first operand and the result.

    Args:
        spec: Einsum of two operands.
        ndim: Dimensions of the first.
    """
    if "..." not in spec:
        return spec
    named = len(spec.partition(",")[0].replace("...", ""))
    free = [letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in spec]
    return spec.replace("...", "".join(free[: ndim - named]))


def _narrow_refuses(call: QuantizedCall) -> str | None:
    if reason := _widened_refuses(call):
        return reason
    chip = None if call.platform == "cpu" else chip_of(call.device_kind)
    units = "int8" if call.activations == "int8" else "fp8"
    has_units = chip is None or (chip.int8 if units == "int8" else chip.fp8) > 0
    return None if has_units else f"finds no units for {units} on {call.device_kind}"


def _first(call: QuantizedCall) -> str | None:
    """Returns the kernel for CPUs, on which XLA multiplies 8 bits several times slower than float32."""
    return "widened" if call.platform == "cpu" else None


def _widened_refuses(call: QuantizedCall) -> str | None:
    if call.activations is None:
        return "needs rounded activations"
    return "needs a weight without zero points" if call.has_zeros else None


def _scaled_after_refuses(call: QuantizedCall) -> str | None:
    if call.group is not None or call.sums_scales or call.has_zeros:
        return "needs a scale for each output of the einsum, and no zero points"
    return call.refuses_rounding()


QUANTIZED_EINSUM = Op(
    "quantized_einsum",
    (
        Kernel("narrow", _narrow, "products of 8 bits in the device's units for them", refuses=_narrow_refuses),
        Kernel(
            "widened",
            _widened,
            "rounded values are multiplied in the dtype of the activations: the same products",
            refuses=_widened_refuses,
        ),
        Kernel(
            "scaled_after",
            _scaled_after,
            "the matmul reads few bits and casts them; scales multiply its result",
            frozenset({"gpu", "tpu"}),  # XLA for CPUs writes the cast matrix to memory
            refuses=_scaled_after_refuses,
        ),
        Kernel(
            "dequantized",
            _dequantized,
            "values times scales, then a matmul in the dtype of the activations",
            refuses=QuantizedCall.refuses_rounding,
        ),
    ),
    first=_first,
)
