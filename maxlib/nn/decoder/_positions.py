"""Absolute positions: vectors that are added to those of tokens, learned or sinusoidal."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._initial_values import Init, normal
from maxlib.nn._linear import draw_key
from maxlib.nn.decoder._context import Context
from maxlib.sharding import constrain


class LearnedPositions(nnx.Module):
    """A trained vector for each of the first `length` positions of a document, added to the token vectors (GPT-2).

    Args:
        length: Number of positions.
        dim: Width D of a vector.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.
    """

    def __init__(self, length: int, dim: int, *, init: Init | None = None, rngs: nnx.Rngs):
        init = normal(0.02) if init is None else init
        self.w = nnx.Param(init(draw_key(rngs), (length, dim), jnp.float32), axes=("position", "embed"))
        self.length = length

    def __call__(self, ctx: Context, *, dtype: Any = jnp.bfloat16) -> Float[Array, "B T D"]:
        """Returns the vectors of `ctx.positions` in `dtype`.

        Explicit positions and those of packed or padded documents are checked outside jit; inside jit, the vectors of
        positions beyond the table are NaN.

        Raises:
            ValueError: when a row or a cache is longer than the table.
        """
        self.check(ctx.rope_length or 0)
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            self.check(int(ctx.positions.max()) + 1)
        return self.rows(ctx.positions, dtype=dtype)

    def rows(self, positions: Int[Array, "B T"], *, dtype: Any = jnp.bfloat16) -> Float[Array, "B T D"]:
        """Returns these rows of the table in `dtype`; NaN for rows that it does not have."""
        # The table is small, so gather it over the width; then the lookup needs no communication. [B, T] -> [B, T, D]
        w = constrain(self.w[...], "position", None)
        return jnp.asarray(jnp.take(w, positions, axis=0, mode="fill"), dtype)

    def check(self, length: int) -> None:
        """Raises ValueError if `length` tokens exceed the table."""
        if length > self.length:
            raise ValueError(
                f"this model has {self.length} learned positions, but {length} tokens (a row, or the capacity of a "
                "cache) need more: shorten the text, or give generation a smaller capacity"
            )


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions:
    """Fixed vectors of sines and cosines, added to the token vectors (Vaswani et al. 2017, arXiv:1706.03762).

    Pair `i` of `dim / 2` has the frequency `max_period^(-i / (dim / 2))`: all sines come first, then all cosines.

    Args:
        dim: Even width D of a vector.
        max_period: Ratio of the longest to the shortest wave.
        interleaved: True puts the sine and the cosine of a pair beside each other, as the paper does.
        last_included: True divides `i` by `dim / 2 - 1`, so that the last pair has the longest wave (Whisper).
    """

    dim: int
    max_period: float = 10_000.0
    interleaved: bool = False
    last_included: bool = False

    def __post_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim must be a positive even number (sines and cosines come in pairs), got {self.dim}")

    def __call__(self, ctx: Context, *, dtype: Any = jnp.bfloat16) -> Float[Array, "B T D"]:
        """Returns the vectors of `ctx.positions` in `dtype`."""
        return jnp.asarray(self.vectors(ctx.positions), dtype)

    def vectors(self, positions: Int[Array, "..."] | Float[Array, "..."]) -> Float[Array, "... D"]:
        """Returns the vectors of any positions in float32; also those of real numbers, such as times of diffusion."""
        count = self.dim // 2
        steps = jnp.arange(count, dtype=jnp.float32) / (count - self.last_included)
        angles = jnp.einsum("...,i->...i", positions.astype(jnp.float32), self.max_period**-steps)
        pairs = jnp.sin(angles), jnp.cos(angles)
        if self.interleaved:
            return jnp.stack(pairs, axis=-1).reshape(*positions.shape, self.dim)
        return jnp.concatenate(pairs, axis=-1)
