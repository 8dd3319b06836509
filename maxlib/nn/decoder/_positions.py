"""Absolute positions, vectors that are added to those of tokens; and position biases, which are added to the scores of
self-attention, as functions of the distance of query and key.

Set a bias as `position_bias` of a `Decoder` or an `Encoder`, or pass it to `make_context`: it is computed once for all
layers. Shapes: B rows, T queries, S keys, N heads.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib._utils.rows import take_rows
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
        """Returns these rows of the table in `dtype`: the first one below 0 (padding), and NaN beyond the last."""
        # The table is small, so gather it over the width; then the lookup needs no communication. [B, T] -> [B, T, D]
        w = constrain(self.w[...], "position", None)
        return jnp.asarray(take_rows(w, jnp.maximum(positions, 0)), dtype)

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


class RelativeBias(nnx.Module):
    """A learned number for each head and bucket of distances (T5, Raffel et al. 2020, arXiv:1910.10683).

    Half of the buckets are single distances, the others grow logarithmically up to `max_distance`; all distances beyond
    share the last one.

    Args:
        num_heads: Number N of heads.
        num_buckets: Number of buckets.
        max_distance: Distance from which all share a bucket.
        bidirectional: True has half of the buckets for keys after the query; False treats them as the query's own.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.

    Raises:
        ValueError: when no buckets are left for single distances, or these exceed `max_distance`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        exact = num_buckets // (4 if bidirectional else 2)
        if not 1 <= exact < max_distance:
            raise ValueError(
                f"half of the buckets of a side ({exact} of num_buckets={num_buckets}) are single distances: they must be "
                f"at least 1 and below max_distance, got max_distance={max_distance}"
            )
        init = normal(0.02) if init is None else init
        self.w = nnx.Param(init(draw_key(rngs), (num_buckets, num_heads), jnp.float32), axes=("position", "heads"))
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional

    def __call__(self, queries: Int[Array, "B T"], keys: Int[Array, " S"]) -> Float[Array, "B N T S"]:
        """Returns the biases of queries and keys with these indices."""
        buckets = self._buckets(keys[None, None, :] - queries[:, :, None])
        return jnp.moveaxis(take_rows(self.w[...], buckets), 3, 1)  # [B, T, S, N] -> [B, N, T, S]

    def _buckets(self, offset: Int[Array, "B T S"]) -> Int[Array, "B T S"]:
        """Returns the bucket of each offset from the query to the key."""
        if self.bidirectional:
            count = self.num_buckets // 2
            first, distance = jnp.where(offset > 0, count, 0), jnp.abs(offset)
        else:
            count = self.num_buckets
            first, distance = 0, jnp.maximum(-offset, 0)
        exact = count // 2
        # exact + log(distance / exact) / log(max_distance / exact) * (count - exact), at most the last bucket
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(self.max_distance / exact)
        far = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
        return first + jnp.where(distance < exact, distance, far)


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """A bias that falls with the distance, with a slope for each head (Press et al. 2022, arXiv:2108.12409).

    The slopes of N heads, N a power of two, are `2^(-8 i / N)` for i = 1 ... N. For other N they are those of the next
    smaller power of two, followed by every second slope of twice as many heads.

    Args:
        num_heads: Number N of heads.
    """

    num_heads: int

    @property
    def slopes(self) -> list[float]:
        """Returns the slope of each head."""
        power = 1 << (self.num_heads.bit_length() - 1)
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
        return [*slopes, *between][: self.num_heads]

    def __call__(self, queries: Int[Array, "B T"], keys: Int[Array, " S"]) -> Float[Array, "B N T S"]:
        """Returns `-slope * |query - key|`."""
        distance = jnp.abs(queries[:, None, :, None] - keys[None, None, None, :])
        return -jnp.asarray(self.slopes)[None, :, None, None] * distance
