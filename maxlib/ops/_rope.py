"""Rotary position embeddings: a specification, its cosine and sine tables, and the rotation itself.

A `Rope` says which angles belong to which position; it is small, frozen and hashable, so layers that share a
specification share its tables. The layouts are those of the published weights, nothing is ever permuted: half-split
pairs dimension `i` with `i + R/2` (Hugging Face), interleaved pairs `2i` with `2i + 1` (the paper, DeepSeek, Llama 4).
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Frequencies = Float32[Array, " half"] | Float32[np.ndarray, " half"]
Length = int | Int[Array, ""]
Lengths = Length | Int[Array, " B"]


def _powers(dim: int, theta: float) -> Float32[np.ndarray, " half"]:
    """theta^(2i / dim), rounded to float32 once, after the float32 exponent that published checkpoints were run
    with.
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def _plain(dim: int, theta: float) -> Float32[np.ndarray, " half"]:
    return np.float32(1) / _powers(dim, theta)


def _check_positive(name: str, **values: float | None) -> None:
    for field, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}.{field} must be a positive number, got {value}.")


@dataclass(frozen=True)
class Scaling:
    """How frequencies change to reach contexts longer than those of the first training. Subclasses are final."""

    needs_length: ClassVar[bool] = False  # True: the frequencies depend on the length of the sequence

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        """Radians per position for each of the `dim / 2` pairs."""
        raise NotImplementedError

    @property
    def magnitude(self) -> float:
        """Factor on cosine and sine, so its square scales the attention logits."""
        return 1.0

    def check(self, dim: int) -> None:
        """Raises ValueError if the scaling cannot serve `dim` rotary dimensions."""


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by `factor` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    factor: float

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        return _plain(dim, theta) / np.float32(self.factor)

    def check(self, dim: int) -> None:
        _check_positive("LinearScaling", factor=self.factor)


@dataclass(frozen=True)
class Proportional(Scaling):
    """Only the first `fraction` of the pairs rotate, with the frequencies of the whole head (Gemma 4).

    Unlike a partial rotary (`Rope.dim` below the head width) the pairs stay those of the whole head.
    """

    fraction: float
    factor: float = 1.0

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        rotated = np.arange(dim // 2) < int(self.fraction * dim // 2)
        return np.where(rotated, _plain(dim, theta), np.float32(0)) / np.float32(self.factor)

    def check(self, dim: int) -> None:
        _check_positive("Proportional", factor=self.factor)
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"Proportional.fraction must be between 0 and 1, got {self.fraction}.")


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A base that grows with the sequence beyond `original_length` (NTK-aware, https://arxiv.org/abs/2309.00071)."""

    factor: float
    original_length: int
    needs_length: ClassVar[bool] = True

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        power = dim / (dim - 2)
        if length is None or isinstance(length, int):  # known now: in float64, as exact as the plain frequencies
            ratio = max(length or 0, self.original_length) / self.original_length
            return _plain(dim, theta * (self.factor * ratio - (self.factor - 1)) ** power)
        ratio = jnp.maximum(length, self.original_length).astype(jnp.float32) / self.original_length
        growth = self.factor * ratio - (self.factor - 1)
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim) * np.float32(power)
        # growth^-exponent on top of the plain frequencies: exact at growth 1, and no large base loses digits
        return jnp.asarray(_plain(dim, theta)) * jnp.exp(-jnp.log(growth) * exponent)

    def check(self, dim: int) -> None:
        _check_positive("DynamicNTK", factor=self.factor, original_length=self.original_length)
        if dim < 4:
            raise ValueError(f"DynamicNTK needs at least 4 rotary dimensions (it divides by dim - 2), got dim={dim}.")


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Long wavelengths stretched by `factor`, short ones kept, smooth in between (https://arxiv.org/abs/2407.21783).

    With equal `low_freq_factor` and `high_freq_factor` nothing is in between (Llama 4 Scout).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def inv_freq(self, dim: int, theta: float, length: Length | None) -> Frequencies:
        plain = _plain(dim, theta)
        rotations = np.float32(self.original_length) / (np.float32(2 * math.pi) / plain)  # within the first context
        span = np.float32(self.high_freq_factor - self.low_freq_factor)
        above = rotations - np.float32(self.low_freq_factor)
        smooth = np.clip(above / span, np.float32(0), np.float32(1)) if span else (above > 0).astype(np.float32)
        return (np.float32(1) - smooth) * plain / np.float32(self.factor) + smooth * plain

    def check(self, dim: int) -> None:
        _check_positive(
            "Llama3Scaling",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            original_length=self.original_length,
        )
        if not self.high_freq_factor >= self.low_freq_factor:
            raise ValueError(
                "Llama3Scaling.high_freq_factor must not be less than low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}."
            )


@dataclass(frozen=True)
class Yarn(Scaling):
    """Interpolates slow pairs, keeps fast ones, and sharpens attention (YaRN, https://arxiv.org/abs/2309.00071).

    The ramp lies between the pairs that turn `beta_fast` and `beta_slow` times within `original_length`; `truncate`
    widens it to whole pairs. `attention_factor` overrides the factor on cosine and sine; otherwise it is
    `yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)` where both are given (DeepSeek), else
    `yarn_mscale(factor)`.
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
        interpolated, kept = np.float32(1) / (np.float32(self.factor) * powers), np.float32(1) / powers
        low, high = self._ramp(dim, theta)
        ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
        return interpolated * (np.float32(1) - keep) + kept * keep

    def _ramp(self, dim: int, theta: float) -> tuple[float, float]:
        def pair(rotations: float) -> float:  # the pair which turns so often within the original length
            return dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return (low, high) if low != high else (low, high + 0.001)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def check(self, dim: int) -> None:
        _check_positive(
            "Yarn",
            factor=self.factor,
            original_length=self.original_length,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )


@dataclass(frozen=True)
class LongRope(Scaling):
    """One divisor per pair: `long_factor` beyond `original_length`, else `short_factor`
    (https://arxiv.org/abs/2402.13753).

    `factor` is the ratio of the longest to the original length; it sets the magnitude unless `attention_factor` does.
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
        _check_positive(
            "LongRope",
            factor=self.factor,
            original_length=self.original_length,
            attention_factor=self.attention_factor,
        )
        for name, values in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(values) != dim // 2:
                raise ValueError(
                    f"LongRope.{name} must have one number per rotary pair ({dim // 2} for dim={dim}), got {len(values)}."
                )
            _check_positive(f"LongRope.{name}", **{str(i): value for i, value in enumerate(values)})


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` dimensions of each head (https://arxiv.org/abs/2104.09864).

    `dim` below the head width is a partial rotary: the other dimensions pass through. `max_length`, where given, is
    the number of positions the model was made for: longer sequences are an error wherever their length is known.
    """

    dim: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    max_length: int | None = None

    def __post_init__(self):
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"Rope.dim must be a positive even number (dimensions rotate in pairs), got {self.dim}.")
        _check_positive("Rope", theta=self.theta, max_length=self.max_length)
        if self.scaling is not None:
            self.scaling.check(self.dim)

    @property
    def needs_length(self) -> bool:
        """Whether the angles depend on the length of the sequence; while decoding, that of each row so far."""
        return self.scaling is not None and self.scaling.needs_length

    def inv_freq(self, length: Length | None = None) -> Frequencies:
        """Radians per position for each pair; `length` matters only if `needs_length` (None: a short sequence)."""
        if self.scaling is None:
            return _plain(self.dim, self.theta)
        return self.scaling.inv_freq(self.dim, self.theta, length)

    def check_length(self, length: int) -> None:
        """Raises ValueError if a sequence of `length` positions is longer than the model was made for."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"a sequence longer than the rotary table allows: at most {self.max_length} positions, got {length}. "
                "Shorten the sequence, or build the model with a rope that reaches further (larger max_length, and a "
                "scaling if it was not trained so far)."
            )

    def tables(
        self, positions: Int[Array, "B T"] | Int[np.ndarray, "B T"], *, length: Lengths | None = None
    ) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
        """Cosine and sine of every pair's angle, with the scaling's magnitude folded in.

        Args:
          positions: place of each token in its sequence.
          length: positions of the whole sequence, cached ones included, one for all rows or one for each; used only if
            `needs_length` (default: the largest position + 1).

        Raises:
          ValueError: positions or length go beyond `max_length`; traced values cannot be checked.
        """
        if self.max_length is not None:
            self._check_known(positions, length)
        positions = jnp.asarray(positions)
        if self.needs_length and length is None:
            length = jnp.max(positions, initial=-1) + 1
        angles = positions.astype(jnp.float32)[..., None] * self._rows_of_frequencies(length)  # [B, T, half]
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

    def _rows_of_frequencies(self, length: Lengths | None) -> Float32[Array, "_ 1 half"]:
        """One row for all sequences, or one for each where they have lengths of their own."""
        if not self.needs_length:
            length = None
        if getattr(length, "ndim", 0) == 1:
            return jnp.asarray(jax.vmap(self.inv_freq)(length))[:, None, :]  # [B, half] -> [B, 1, half]
        return jnp.asarray(self.inv_freq(length))[None, None, :]

    def _check_known(self, positions: Array | np.ndarray, length: Lengths | None) -> None:
        for value in (length, positions.max() + 1 if positions.size else None):
            with contextlib.suppress(jax.errors.ConcretizationTypeError):  # traced: its value is not known here
                self.check_length(0 if value is None else int(jnp.max(jnp.asarray(value))))


def apply_rope(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotates the first `2 * half` dimensions of every head, in float32; the others pass through, the dtype stays.

    Raises ValueError if the tables rotate more dimensions than a head has.
    """
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"the rotary tables turn {dim} dimensions, more than the {x.shape[-1]} of a head.")
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotating = x[..., :dim].astype(jnp.float32)
    if interleaved:
        pairs = rotating.reshape(*x.shape[:-1], dim // 2, 2)
        turned = jnp.stack(_turn(pairs[..., 0], pairs[..., 1], cos, sin), axis=-1).reshape(rotating.shape)
    else:  # slices and one concatenation: the form that XLA makes one pass of, backwards too
        turned = jnp.concatenate(_turn(rotating[..., : dim // 2], rotating[..., dim // 2 :], cos, sin), axis=-1)
    turned = turned.astype(x.dtype)
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, x[..., dim:]], axis=-1)


def _turn(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    return a * cos - b * sin, b * cos + a * sin


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention magnitude, 0.1 mscale ln(factor) + 1; DeepSeek multiplies its softmax scale by the square."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
