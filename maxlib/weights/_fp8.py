"""Scaled FP8: a float8 tensor `x` with scales `x_scale_inv`; in DeepSeek V4 `x.weight` with `x.scale`.

There is one scale for each 128 x 128 block (DeepSeek V3 and others), or one for the whole tensor (Ministral 3). Stacked
experts in one tensor have separate scales (Mistral Small 4). DeepSeek V4's experts are FP4: int8 tensors, two numbers
in a byte, with a power of two for 32 numbers of a row. Such a pair is read like one plain tensor, so model tables
do not mention it. Activation scales, which are for FP8 matmuls, are ignored. Exports are plain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from maxlib.weights import mxfp4
from maxlib.weights.files import Stored

BLOCK = 128
SUFFIX = "_scale_inv"
ACTIVATION = "activation_scale"  # replaces "weight", or is appended to other names, if activations have fixed scales
_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FP4 = np.dtype(np.int8)
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


@dataclass(frozen=True)
class ScaledFP4(Stored):
    """A matrix of bfloat16, computed from two stored tensors: `O I/2` bytes, and scales `O I/32` in E8M0."""

    as_stored: ClassVar[bool] = False
    raw: Stored
    scale: Stored

    def view(self) -> np.ndarray:
        """Returns the values."""
        # [O, I / 2] -> [O, I / 32, 16] -> [O, I]
        blocks = self.raw.view().view(np.uint8).reshape(*self.scale.shape, mxfp4.BLOCK // 2)
        return mxfp4.dequantize(blocks, self.scale.view().view(np.uint8))


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
    scales = {name: _scale_name(name, stored) for name, t in stored.items() if t.dtype in (*_DTYPES, _FP4)}
    scales = {name: scale for name, scale in scales.items() if scale is not None}
    of_scaled = {*scales.values(), *map(_activation, scales)}
    return {name: _scaled(name, scales, stored) for name in stored if name not in of_scaled}


def _scaled(name: str, scales: Mapping[str, str], stored: Mapping[str, Stored]) -> Stored:
    """Returns a tensor with its scales, if it has any; raises ValueError for those that do not fit."""
    raw, bfloat16 = stored[name], np.dtype(ml_dtypes.bfloat16)
    if name not in scales:
        return raw
    scale = stored[scales[name]]
    if raw.dtype == _FP4:
        if len(raw.shape) != 2 or scale.shape != (raw.shape[0], raw.shape[1] * 2 / mxfp4.BLOCK):
            raise ValueError(
                f"{scales[name]} must have a factor for {mxfp4.BLOCK} numbers of a row of {name}, two in a byte, which has "
                f"shape {raw.shape}, but has shape {scale.shape}."
            )
        return ScaledFP4(raw.path, raw.offset, bfloat16, (raw.shape[0], 2 * raw.shape[1]), raw, scale)
    blocks = (*raw.shape[:-2], *(-(-n // BLOCK) for n in raw.shape[-2:]))
    if len(raw.shape) not in (2, 3) or not (scale.shape == blocks or _of_matrices(raw.shape, scale.shape)):
        raise ValueError(
            f"{scales[name]} must have a factor for each {BLOCK} x {BLOCK} of {name}, which has shape {raw.shape}, "
            f"or one for each matrix of it, but has shape {scale.shape}."
        )
    return Scaled(raw.path, raw.offset, bfloat16, raw.shape, raw, scale)


def _scale_name(name: str, stored: Mapping[str, Stored]) -> str | None:
    """Returns the name of a tensor's scales; None if there are none."""
    names = [name + SUFFIX, *([f"{name.removesuffix('weight')}scale"] if name.endswith(".weight") else [])]
    return next((scale for scale in names if scale in stored), None)


def _activation(name: str) -> str:
    """Returns the name of the activation scales for the weight `name`."""
    return f"{name.removesuffix('weight')}{ACTIVATION}" if name.endswith(".weight") else f"{name}_{ACTIVATION}"
