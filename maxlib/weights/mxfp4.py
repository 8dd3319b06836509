"""MXFP4, the format of GPT-OSS's experts: `x_blocks` has two 4-bit floats per byte, and `x_scales` a power of two for
every 32 of them.

The format is that of the Open Compute Project's Microscaling specification 1.0, with the element type E2M1.
"""

import functools

import ml_dtypes
import numpy as np

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Computes the values in bfloat16, which represents them exactly.

    A byte's low half is the first value; a scale of 255 makes its block NaN.

    Args:
        blocks: `*O G 16`, two 4-bit floats per byte.
        scales: `*O G`, exponents of two with a bias of 127.

    Returns:
        `*O (G 32)`.

    Raises:
        ValueError: For any other shapes or dtypes.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"MXFP4's blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}")
    if blocks.shape[-1:] != (BLOCK // 2,) or blocks.shape[:-1] != scales.shape or not scales.ndim:
        raise ValueError(
            f"MXFP4's blocks must be of {BLOCK // 2} bytes and have a scale each, but blocks have shape {blocks.shape} and "
            f"scales {scales.shape}"
        )
    index = (scales.astype(np.uint16) << 8)[..., None] | blocks
    return np.take(_pairs(), index).view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


@functools.cache
def _pairs() -> np.ndarray:
    """Tabulates the two values of every scale and byte, packed into 32 bits.

    One lookup then replaces the arithmetic on each value.
    """
    values = np.array([*_MAGNITUDES, *np.negative(_MAGNITUDES)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(pairs, np.arange(256)[:, None, None] - _BIAS)
    scaled[255] = np.nan
    return scaled.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)
