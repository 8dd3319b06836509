"""Rules that change RoPE's frequencies so that a model can use longer contexts, such as YaRN and LongRoPE."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

Frequencies = Float32[Array, " half"] | Float32[np.ndarray, " half"]
Length = int | Int[Array, ""]


def _powers(dim: int, theta: float) -> Float32[np.ndarray, " half"]:
    """Computes theta^(2i / dim), shape `(dim / 2,)`, in float32."""
    # Published models use a float32 exponent, so round the exponent first; the power is rounded only once.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def plain_frequencies(dim: int, theta: float) -> Float32[np.ndarray, " half"]:
    """Computes the unscaled frequencies, theta^(-2i / dim)."""
    return np.float32(1) / _powers(dim, theta)


def check_positive(name: str, **values: float | None) -> None:
    for field, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}.{field} must be a positive number, got {value}.")


_POSITIVE = ("factor", "low_freq_factor", "original_length", "beta_fast", "beta_slow", "attention_factor")


@dataclass(frozen=True)
class RopeScaling:
    """Base class of the rules that change RoPE's frequencies so that a model can use longer contexts."""

    needs_length: ClassVar[bool] = False  # True: the frequencies depend on the length of the sequence

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        """Returns the frequency of each of the `dim / 2` pairs, in radians per position.

        Args:
            dim: Number of rotary dimensions.
            theta: Base of the frequencies.
            length: Number of positions in the sequence; ignored unless `needs_length`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define inv_freq(dim, theta, length)")

    @property
    def magnitude(self) -> float:
        """Returns the factor on cosine and sine. Its square scales the attention logits (q and k both carry it)."""
        return 1.0

    def check(self, dim: int) -> None:
        """Checks the parameters.

        Raises:
            ValueError: When a parameter is out of range, or the scaling cannot be used with `dim` rotary dimensions.
        """
        check_positive(type(self).__name__, **{name: getattr(self, name, None) for name in _POSITIVE})


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: positions are divided by `factor` (https://arxiv.org/abs/2306.15595).

    Args:
        factor: Ratio of the new context length to the original one.
    """

    factor: float

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        return plain_frequencies(dim, theta) / np.float32(self.factor)  # (p / s) * f = p * (f / s)


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Rotation of only the first `fraction` of the pairs, with the frequencies of the whole head (Gemma 4).

    Unlike a partial rotary embedding (`Rope.dim` below the head width), pairs are formed over the whole head.

    Args:
        fraction: Share of the pairs that rotate, from 0 to 1; the other pairs have frequency 0.
        factor: Divisor of the frequencies, as in `LinearScaling`.
    """

    fraction: float
    factor: float = 1.0

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        rotated = np.arange(dim // 2) < int(self.fraction * dim // 2)
        return np.where(rotated, plain_frequencies(dim, theta), np.float32(0)) / np.float32(self.factor)

    def check(self, dim: int) -> None:
        super().check(dim)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"ProportionalScaling.fraction must be between 0 and 1, got {self.fraction}.")


@dataclass(frozen=True)
class DynamicNTKScaling(RopeScaling):
    """NTK-aware scaling: the base grows with the sequence beyond `original_length` (https://arxiv.org/abs/2309.00071).

    Args:
        factor: Ratio of the longest supported context to the original one.
        original_length: Number of positions the model was first trained with.
    """

    factor: float
    original_length: int
    needs_length: ClassVar[bool] = True

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        # theta' = theta * (factor * L / L0 - (factor - 1))^(dim / (dim - 2)): the fastest pair keeps its frequency and
        # the slowest one is interpolated; L = max(length, L0), so short sequences keep the original base.
        power = dim / (dim - 2)
        if length is None or isinstance(length, int):  # static: compute in float64, as for the plain frequencies
            ratio = max(length or 0, self.original_length) / self.original_length
            return plain_frequencies(dim, theta * (self.factor * ratio - (self.factor - 1)) ** power)
        ratio = jnp.maximum(length, self.original_length).astype(jnp.float32) / self.original_length
        growth = self.factor * ratio - (self.factor - 1)
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim) * np.float32(power)
        # plain frequencies times growth^-exponent: exact at growth 1, and a large base loses no digits
        return jnp.asarray(plain_frequencies(dim, theta)) * jnp.exp(-jnp.log(growth) * exponent)

    def check(self, dim: int) -> None:
        super().check(dim)
        if dim < 4:
            raise ValueError(
                f"DynamicNTKScaling needs at least 4 rotary dimensions (it divides by dim - 2), got dim={dim}."
            )


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3's scaling: long wavelengths are stretched, short ones kept (https://arxiv.org/abs/2407.21783).

    Pairs between the two bounds are interpolated smoothly. Equal bounds give a hard step (Llama 4 Scout).

    Args:
        factor: Divisor of the low frequencies.
        low_freq_factor: Pairs that turn fewer times than this within `original_length` are divided by `factor`.
        high_freq_factor: Pairs that turn more often than this within `original_length` keep their frequency.
        original_length: Number of positions the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        plain = plain_frequencies(dim, theta)
        # Turns within the original context: L0 / wavelength, where wavelength = 2 pi / frequency.
        rotations = np.float32(self.original_length) / (np.float32(2 * math.pi) / plain)
        span = np.float32(self.high_freq_factor - self.low_freq_factor)
        above = rotations - np.float32(self.low_freq_factor)
        smooth = np.clip(above / span, np.float32(0), np.float32(1)) if span else (above > 0).astype(np.float32)
        # smooth is 0 for slow pairs (interpolated), 1 for fast ones (kept).
        return (np.float32(1) - smooth) * plain / np.float32(self.factor) + smooth * plain

    def check(self, dim: int) -> None:
        super().check(dim)
        if not self.high_freq_factor >= self.low_freq_factor:
            raise ValueError(
                "Llama3Scaling.high_freq_factor must not be less than low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}."
            )


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN: slow pairs are interpolated, fast ones kept, and attention is sharpened (https://arxiv.org/abs/2309.00071).

    Args:
        factor: Ratio of the new context length to the original one.
        original_length: Number of positions the model was first trained with.
        beta_fast: Pairs that turn more often than this within `original_length` keep their frequency.
        beta_slow: Pairs that turn less often than this are divided by `factor`; a linear ramp connects the two.
        attention_factor: Factor on cosine and sine. By default it is computed: `yarn_mscale(factor, mscale) /
            yarn_mscale(factor, mscale_all_dim)` when both are given (DeepSeek), else `yarn_mscale(factor)`.
        mscale: Numerator of that quotient.
        mscale_all_dim: Denominator of that quotient.
        truncate: Rounds the ends of the ramp outwards to whole pairs.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        powers = _powers(dim, theta)
        interpolated, plain = np.float32(1) / (np.float32(self.factor) * powers), np.float32(1) / powers
        low, high = self._ramp(dim, theta)
        ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        # keep is 1 for the fast pairs before `low` and 0 for the slow ones after `high`.
        keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
        return interpolated * (np.float32(1) - keep) + plain * keep

    def _ramp(self, dim: int, theta: float) -> tuple[float, float]:
        """Returns the indices of the pairs where the ramp begins and ends."""

        def pair(rotations: float) -> float:
            # Solve L0 * theta^(-2i / dim) = 2 pi * rotations for the pair index i.
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return (low, high) if low != high else (low, high + 0.001)  # no division by zero

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE: a separate divisor for the frequency of each pair (https://arxiv.org/abs/2402.13753).

    Args:
        short_factor: `dim / 2` divisors for sequences of up to `original_length` positions.
        long_factor: `dim / 2` divisors for longer sequences.
        original_length: Number of positions the model was first trained with.
        factor: Ratio of the longest to the original length; it sets the magnitude unless `attention_factor` is given.
        attention_factor: Factor on cosine and sine; default `sqrt(1 + ln(factor) / ln(original_length))`.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_length: int
    factor: float
    attention_factor: float | None = None
    needs_length: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "short_factor", tuple(self.short_factor))  # a list would not hash
        object.__setattr__(self, "long_factor", tuple(self.long_factor))

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        powers = _powers(dim, theta)
        short, long = (
            np.float32(1) / (np.asarray(f, np.float32) * powers) for f in (self.short_factor, self.long_factor)
        )
        return jnp.where(jnp.asarray(0 if length is None else length) > self.original_length, long, short)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_length))

    def check(self, dim: int) -> None:
        super().check(dim)
        for name, values in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(values) != dim // 2:
                raise ValueError(
                    f"LongRopeScaling.{name} must have one number per rotary pair ({dim // 2} for dim={dim}), got {len(values)}."
                )
            check_positive(f"LongRopeScaling.{name}", **{str(i): value for i, value in enumerate(values)})


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's attention magnitude, `0.1 * mscale * ln(factor) + 1` (https://arxiv.org/abs/2309.00071).

    DeepSeek multiplies its softmax scale by the square of it.

    Args:
        factor: Ratio of the new context length to the original one; the magnitude is 1 for factors up to 1.
        mscale: Strength of the correction.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
