"""Scaled FP8: a float8 `x`, and in `x_scale_inv` its factors.

There is one factor for each 128 x 128 of it, as DeepSeek V3 and others ship it, or one for all of it (Ministral 3).
Such a pair reads like one plain tensor, so no model's table mentions it. Factors of activations, which are for matmuls
in FP8, are passed over. Exports are plain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from maxlib.weights._files import Stored

BLOCK = 128
SUFFIX = "_scale_inv"
ACTIVATION = "activation_scale"  # in place of "weight", where activations have a factor that was measured once
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
        return dequantize(self.raw.view(), self.scale.view())


def dequantize(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiplies `x` by the factors of its blocks, the last of which may be incomplete, or by its one factor, in
    float32.
    """
    values = np.take(_BYTES.view(x.dtype).astype(np.float32), x.view(np.uint8))  # much faster than astype
    scale = scale.astype(np.float32)
    if scale.size == 1:
        values *= scale.reshape(())
        return values
    for row in range(scale.shape[0]):
        part = values[row * BLOCK : (row + 1) * BLOCK]
        part *= np.repeat(scale[row], BLOCK)[: x.shape[1]]
    return values


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Joins each tensor of `stored` that has factors with them.

    Raises ValueError for factors that do not fit their tensor.
    """
    scaled = {name: t for name, t in stored.items() if t.dtype in _DTYPES and name + SUFFIX in stored}
    of_scaled = {name + SUFFIX for name in scaled}
    of_scaled |= {f"{name.removesuffix('weight')}{ACTIVATION}" for name in scaled if name.endswith(".weight")}
    joined = {name: t for name, t in stored.items() if name not in of_scaled}
    for name, raw in scaled.items():
        scale = stored[name + SUFFIX]
        blocks = tuple(-(-n // BLOCK) for n in raw.shape)
        if scale.shape not in ((), (1,), blocks) or len(raw.shape) != 2:
            raise ValueError(
                f"{name + SUFFIX} must have a factor for each {BLOCK} x {BLOCK} of {name}, which has shape {raw.shape}, "
                f"or one for all of it, but has shape {scale.shape}."
            )
        joined[name] = Scaled(raw.path, raw.offset, np.dtype(ml_dtypes.bfloat16), raw.shape, raw, scale)
    return joined
