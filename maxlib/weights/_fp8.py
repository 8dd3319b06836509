"""Scaled FP8: a float8 `x`, and in `x_scale_inv` its factors.

There is one factor for each 128 x 128 of it, as DeepSeek V3 and others ship it, or one for all of it (Ministral 3).
Experts may lie in one tensor, each with such factors of its own (Mistral Small 4). Such a pair reads like one plain
tensor, so no model's table mentions it. Factors of activations, which are for matmuls in FP8, are passed over. Exports
are plain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from maxlib.weights._files import Stored

BLOCK = 128
SUFFIX = "_scale_inv"
ACTIVATION = "activation_scale"  # in place of "weight", or behind a name without, if activations have fixed factors
_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_BYTES = np.arange(256, dtype=np.uint8)


def is_scaled_fp8(quantization: Any) -> bool:
    """Returns True if `quantization`, the `quantization_config` of a config.json, describes this format."""
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "fp8"
        and quantization.get("weight_block_size") in ([BLOCK, BLOCK], None)
    )


@dataclass(frozen=True)
class Scaled(Stored):
    """A tensor of bfloat16's precision made of two that are stored."""

    as_stored: ClassVar[bool] = False
    raw: Stored
    scale: Stored

    def view(self) -> np.ndarray:
        """Returns the values, in float32."""
        return self.part(lambda values: values)

    def part(self, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns `take(values)`, in float32; with factors of blocks all values are computed for it."""
        raw, scale = self.raw.view(), self.scale.view().astype(np.float32)
        if not _of_matrices(raw.shape, scale.shape):
            return take(dequantize(raw, scale))
        # A factor for each matrix, or one: [], [1], [E] or [E, 1, 1] -> a view as large as the tensor.
        factors = np.broadcast_to(scale.reshape(-1, *[1] * (raw.ndim - 1)), raw.shape)
        return _float32(take(raw)) * take(factors)


def _of_matrices(shape: tuple[int, ...], factors: tuple[int, ...]) -> bool:
    """Returns True for one factor of all, or one of each matrix of a stack."""
    stacked = [shape[:1], (*shape[:1], 1, 1)] if len(shape) == 3 else []
    return factors in ((), (1,), *stacked)


def _float32(x: np.ndarray) -> np.ndarray:
    return np.take(_BYTES.view(x.dtype).astype(np.float32), x.view(np.uint8))  # much faster than astype


def dequantize(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiplies a matrix, or each of a stack, by the factors of its blocks, the last of which may be incomplete."""
    values = _float32(x)
    for matrix, factors in zip(values, scale, strict=True) if x.ndim == 3 else [(values, scale)]:
        for row, own in enumerate(factors):
            part = matrix[row * BLOCK : (row + 1) * BLOCK]
            part *= np.repeat(own, BLOCK)[: x.shape[-1]]
    return values


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Joins each tensor of `stored` that has factors with them.

    Raises ValueError for factors that do not fit their tensor.
    """
    scaled = {name: t for name, t in stored.items() if t.dtype in _DTYPES and name + SUFFIX in stored}
    of_scaled = {name + SUFFIX for name in scaled}
    of_scaled |= {_activation(name) for name in scaled}
    joined = {name: t for name, t in stored.items() if name not in of_scaled}
    for name, raw in scaled.items():
        scale = stored[name + SUFFIX]
        blocks = (*raw.shape[:-2], *(-(-n // BLOCK) for n in raw.shape[-2:]))
        if len(raw.shape) not in (2, 3) or not (scale.shape == blocks or _of_matrices(raw.shape, scale.shape)):
            raise ValueError(
                f"{name + SUFFIX} must have a factor for each {BLOCK} x {BLOCK} of {name}, which has shape {raw.shape}, "
                f"or one for each matrix of it, but has shape {scale.shape}."
            )
        joined[name] = Scaled(raw.path, raw.offset, np.dtype(ml_dtypes.bfloat16), raw.shape, raw, scale)
    return joined


def _activation(name: str) -> str:
    """Names the factors of what is multiplied by `name`."""
    return f"{name.removesuffix('weight')}{ACTIVATION}" if name.endswith(".weight") else f"{name}_{ACTIVATION}"
