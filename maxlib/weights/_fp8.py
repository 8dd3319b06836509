"""Scaled FP8: a float8 tensor `x` with scales `x_scale_inv`.

There is one scale for each 128 x 128 block (DeepSeek V3 and others), or one for the whole tensor (Ministral 3). Stacked
experts in one tensor have separate scales (Mistral Small 4). Such a pair is read like one plain tensor, so model tables
do not mention it. Activation scales, which are for FP8 matmuls, are ignored. Exports are plain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from maxlib.weights.files import Stored

BLOCK = 128
SUFFIX = "_scale_inv"
ACTIVATION = "activation_scale"  # replaces "weight", or is appended to other names, if activations have fixed scales
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
    """A tensor of bfloat16 precision, computed from two stored tensors."""

    as_stored: ClassVar[bool] = False
    raw: Stored
    scale: Stored

    def view(self) -> np.ndarray:
        """Returns the values, in float32."""
        return self.part(lambda values: values)

    def part(self, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns `take(values)` in float32; with block scales it computes all values first."""
        raw, scale = self.raw.view(), self.scale.view().astype(np.float32)
        if not _of_matrices(raw.shape, scale.shape):
            return take(dequantize(raw, scale))
        # One scale in all or per matrix: [], [1], [E] or [E, 1, 1] -> a view of the tensor's shape.
        factors = np.broadcast_to(scale.reshape(-1, *[1] * (raw.ndim - 1)), raw.shape)
        return _float32(take(raw)) * take(factors)


def _of_matrices(shape: tuple[int, ...], factors: tuple[int, ...]) -> bool:
    """Returns True for a single scale, or one for each matrix of a stack."""
    stacked = [shape[:1], (*shape[:1], 1, 1)] if len(shape) == 3 else []
    return factors in ((), (1,), *stacked)


def _float32(x: np.ndarray) -> np.ndarray:
    return np.take(_BYTES.view(x.dtype).astype(np.float32), x.view(np.uint8))  # much faster than astype


def dequantize(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiplies a matrix, or each of a stack, by its block scales; the last blocks may be partial."""
    values = _float32(x)
    for matrix, factors in zip(values, scale, strict=True) if x.ndim == 3 else [(values, scale)]:
        for row, scales in enumerate(factors):
            part = matrix[row * BLOCK : (row + 1) * BLOCK]
            part *= np.repeat(scales, BLOCK)[: x.shape[-1]]
    return values


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Combines each tensor of `stored` that has scales with them.

    Raises ValueError for scales that do not fit their tensor.
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
    """Returns the name of the activation scales for the weight `name`."""
    return f"{name.removesuffix('weight')}{ACTIVATION}" if name.endswith(".weight") else f"{name}_{ACTIVATION}"
