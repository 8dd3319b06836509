"""Moments of optimizers in eight bits: float8 with a scale for each block."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxlib.training._optimizer_wrappers import Scaled, low_moments

BLOCK = 128  # values on the last axis that share a scale
LEAST = 16  # smaller blocks would need as many bytes for scales as they save
LARGEST = 240.0  # what a block's largest magnitude becomes; float8_e4m3fn ends at 448
_NOISE_BITS = 20  # of float32's 23 bits of mantissa, float8_e4m3fn has three


def eight_bit_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` so that it computes in float32 and holds its moments in eight bits, in float8_e4m3fn.

    Blocks of up to 128 values on the last axis have a scale in float32, so a moment takes 1.03 bytes. A second moment
    (`nu`) is stored as its square root, which spans half as many orders of magnitude. As in `bfloat16_moments`, values
    are rounded stochastically, and parameters may be bfloat16. Moments whose last axis has no block of at least 16
    values stay in float32.

    Args:
        optimizer: The optimizer to wrap.
    """

    def narrow(path: Any, x: Array, key: Array) -> Any:
        return _scaled(x, key, is_square=_is_square(path)) if _block(x) >= LEAST else x

    def widen(path: Any, x: Any) -> Any:
        return _restored(x, is_square=_is_square(path)) if isinstance(x, Scaled) else x

    return low_moments(optimizer, narrow, widen)


def _is_square(path: Any) -> bool:
    """Returns True for the path of a second moment in an optimizer's state."""
    return any(getattr(key, "name", None) == "nu" for key in path)


def _block(x: Array) -> int:
    return math.gcd(x.shape[-1], BLOCK) if x.ndim else 1


def _scaled(x: Array, key: Array, *, is_square: bool) -> Scaled:
    x = jnp.sqrt(x) if is_square else x
    blocks = x.reshape(*x.shape[:-1], -1, _block(x))
    scales = jnp.max(jnp.abs(blocks), axis=-1) / LARGEST
    codes = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    # Noise below the last bit that is kept, then truncation: the mean of the result is the value.
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint32)
    noise = jax.random.bits(key, codes.shape, jnp.uint32) >> (32 - _NOISE_BITS)
    mask = jnp.uint32(0xFFFFFFFF << _NOISE_BITS & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & mask, jnp.float32)
    rounded = jnp.where(jnp.abs(codes) < float(jnp.finfo(jnp.float8_e4m3fn).smallest_normal), codes, rounded)
    return Scaled(rounded.astype(jnp.float8_e4m3fn).reshape(x.shape), scales)


def _restored(x: Scaled, *, is_square: bool) -> Float[Array, "..."]:
    codes = x.codes.astype(jnp.float32)
    blocks = codes.reshape(*codes.shape[:-1], x.scales.shape[-1], -1) * x.scales[..., None]
    values = blocks.reshape(codes.shape)
    return jnp.square(values) if is_square else values
