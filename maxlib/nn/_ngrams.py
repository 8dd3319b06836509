"""Embeddings of hashed n-grams (Qwen3.8-Flash-Next 2026): what the last few ids of a text add to its residual streams.
Their rows in a table are products of 63 bits by arithmetic of 32.

Shapes: B rows, T new tokens, n streams, D width, M n-gram heads, E width of all of them, W taps.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int64

from maxlib._utils.rows import take_rows
from maxlib.nn._initial_values import normal
from maxlib.nn._linear import Einsum, draw_key
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import LayerCache
from maxlib.nn.decoder._context import Context
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import GroupRMSNorm
from maxlib.nn.recurrent._common import taps
from maxlib.sharding import constrain

_LIMB, _LIMBS = 7, 9  # a number below 2^63 is nine digits of 7 bits: no step below reaches 2^32
_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class NgramHash:
    """Rows of the n-grams of 2 to `size` ids in one table: `heads` of each order, hashed independently.

    The ids, times odd numbers below 2^63 / vocab, are XORed. The remainder by a prime is the row within the part of the
    table that belongs to a head.

    Args:
        vocab: Number of ids, at most 2^24.
        size: Ids of the longest n-grams.
        heads: Heads of each order.
        base: Least number of rows of a head, below 2^25; the heads have the next primes.
        layer: Which of the model's tables this is.
        seed: Seed of the factors.

    Raises:
        ValueError: when there are more ids or rows than that, or a head has fewer than two rows.
    """

    vocab: int
    size: int
    heads: int
    base: int
    layer: int
    seed: int

    def __post_init__(self):
        if self.vocab > 1 << 24 or self.base < 2 or self.rows.max() >= 1 << 25:
            raise ValueError(
                f"n-grams need at most 2^24 ids and heads of 2 to 2^25 rows, got {self.vocab} and {self.base}"
            )

    @property
    def num_heads(self) -> int:
        """Number of heads of all orders."""
        return self.heads * (self.size - 1)

    @property
    def factors(self) -> Int64[np.ndarray, " size"]:
        """Factors of the last ids."""
        half, state = max(1, ((1 << 63) - 1) // self.vocab // 2), self.seed + 10007 * self.layer
        return np.array([2 * (_splitmix(state + _GAMMA * i) % half) + 1 for i in range(1, self.size + 1)], np.int64)

    @property
    def rows(self) -> Int64[np.ndarray, " M"]:
        """Number of rows of each head."""
        return np.array(_primes(self.base, (self.layer + 1) * self.num_heads)[-self.num_heads :], np.int64)

    @property
    def offsets(self) -> Int64[np.ndarray, " M"]:
        """First row of each head."""
        return np.cumsum([0, *self.rows[:-1]])

    def __call__(self, last: list[Int[Array, "B T"]]) -> Int[Array, "B T M"]:
        """Returns the row of each head, given the ids, those before them, and so on: `size` arrays."""
        mixed, rows = self._digits(last[0], 0), []
        for order in range(1, self.size):
            mixed = [a ^ b for a, b in zip(mixed, self._digits(last[order], order), strict=True)]
            sizes = jnp.asarray(self.rows[(order - 1) * self.heads : order * self.heads], jnp.uint32)[None, None]
            row = jnp.zeros((*last[0].shape, self.heads), jnp.uint32)
            for digit in reversed(mixed):
                row = ((row << _LIMB) + digit[..., None]) % sizes
            rows.append(row.astype(jnp.int32))
        return jnp.concatenate(rows, axis=-1) + jnp.asarray(self.offsets, jnp.int32)[None, None]

    def _digits(self, ids: Int[Array, "B T"], order: int) -> list[Array]:
        """Returns the digits of the product of ids and their factor, the lowest first."""
        ids, carry, digits = ids.astype(jnp.uint32), jnp.zeros(ids.shape, jnp.uint32), []
        factor = int(self.factors[order])
        for n in range(_LIMBS):
            carry = carry + ids * np.uint32(factor >> (_LIMB * n) & 127)
            digits.append(carry & 127)
            carry = carry >> _LIMB
        return digits


def _splitmix(value: int) -> int:
    """Returns the next number of the generator SplitMix64 (Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@functools.cache
def _primes(least: int, count: int) -> list[int]:
    """Returns the first primes from `least` on."""
    primes, number = [], least
    while len(primes) < count:
        if all(number % d for d in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


@pytree
class NgramCache(LayerCache):
    """Cache of `NgramEmbedding`. Its size does not depend on the number of tokens, and it cannot be rewound.

    Attributes:
        tokens: The last ids, `B N`.
        tail: The last inputs of the convolution, `B U n*D`.
    """

    kind: ClassVar[str | None] = "state"

    tokens: Int[Array, "B N"]
    tail: Float[Array, "B U F"]


class NgramEmbedding(SequenceMixer):
    """What hashed n-grams add to residual streams: `value + silu(conv(norm(value)))`, with a gate for each stream.

    `value` is a projection of the vectors of the n-grams that end with a token. The gate compares another projection
    with the normed stream. The convolution of each channel reads every `size`th token. N-grams and convolution do not
    reach over the borders of documents, and n-grams not over `end`. Tokens must be in order, and the model passes them
    on (`layers_take_tokens`).

    Args:
        dim: Width D of a stream.
        streams: Number n of streams.
        hash: Rows of n-grams.
        width: Width E of the vectors of all heads together.
        parts: Parts of the table along its rows, as files store it.
        rows_multiple: The number of rows is rounded up to a multiple.
        end: Id that ends a text.
        conv_width: Number W of taps of the convolution.
        norm_eps: Epsilon of the norms.
        rngs: Source of initial values.

    Raises:
        ValueError: when `parts` does not divide the rows of the table, or the heads of `hash` its width.
    """

    kind: ClassVar[str | None] = "hashed n-grams"

    def __init__(
        self,
        dim: int,
        *,
        streams: int,
        hash: NgramHash,
        width: int,
        parts: int,
        rows_multiple: int,
        end: int,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
    ):
        rows, F = -(-int(hash.rows.sum()) // rows_multiple) * rows_multiple, streams * dim
        if rows % parts or width % hash.num_heads:
            raise ValueError(
                f"{parts} parts must divide the {rows} rows of the table, and {hash.num_heads} heads its width {width}"
            )
        shape = (parts, rows // parts, width // hash.num_heads)
        # FSDP splits the parts: vectors of a head, 160 numbers, are narrower than many meshes.
        self.table = nnx.Param(normal(0.02)(draw_key(rngs), shape, jnp.float32), axes=("embed", None, None))
        self.key = Einsum("...E,DE->...D", (F, width), ("embed", "rank"), rngs=rngs)
        self.value = Einsum("...E,DE->...D", (dim, width), ("embed", "rank"), rngs=rngs)
        norm = functools.partial(GroupRMSNorm, F, groups=streams, eps=norm_eps, plus_one=True)
        self.key_norm, self.query_norm, self.conv_norm = norm(), norm(), norm()
        self.conv = taps((F, conv_width), ("norm",), rngs)
        self.hash, self.end, self.dim, self.streams, self.conv_width = hash, end, dim, streams, conv_width

    def __call__(
        self, x: Float[Array, "B T n D"], ctx: Context, cache: NgramCache | None = None
    ) -> tuple[Float[Array, "B T n D"], NgramCache | None]:
        """Returns what is added to the streams, and the new cache.

        Args:
            x: The streams.
            ctx: Values shared by all layers, with the ids of tokens.
            cache: The last ids and inputs of the convolution, or None.
        """
        if ctx.tokens is None:
            raise ValueError("n-grams need the ids of tokens: set layers_take_tokens = True on the model")
        flat = x.reshape(*x.shape[:2], -1)
        tokens = _History(ctx.tokens, None if cache is None else cache.tokens, self.hash.size - 1)
        vectors = self._vectors(tokens, ctx).astype(x.dtype)
        # One number for each stream, [B, T, n, 1].
        key, query = (y.reshape(x.shape) for y in (self.key_norm(self.key(vectors)), self.query_norm(flat)))
        score = jnp.sum(key * query, axis=-1, keepdims=True) / math.sqrt(self.dim)
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        value = (gate * self.value(vectors)[:, :, None]).reshape(flat.shape)
        inputs = _History(self.conv_norm(value), None if cache is None else cache.tail, self._reach)
        lags = [self.hash.size * (self.conv_width - 1 - tap) for tap in range(self.conv_width)]
        filters = jnp.moveaxis(self.conv[...], 1, 0).astype(x.dtype)[:, None, None]
        mixed = sum(w * inputs.before(lag, ctx, 0) for w, lag in zip(filters, lags, strict=True))
        out = constrain((value + jax.nn.silu(mixed)).reshape(x.shape), "batch", "seq", None, "act_embed")
        return out, None if cache is None else NgramCache(tokens.tail(ctx), inputs.tail(ctx))

    def _vectors(self, tokens: "_History", ctx: Context) -> Float[Array, "B T E"]:
        """Returns the vectors of all heads."""
        last = [tokens.before(0, ctx, self.end)]
        for lag in range(1, self.hash.size):
            # Before the end of a text there is nothing but ends.
            ended = (last[-1] == self.end) if lag > 1 else False
            last.append(jnp.where(ended, self.end, tokens.before(lag, ctx, self.end)))
        rows = self.hash(last)
        # [P, R, W] -> [P * R, W] -> [B, T, M, W] -> [B, T, M * W]
        table = self.table[...].reshape(-1, self.table.shape[2])
        return constrain(take_rows(table, rows).reshape(*rows.shape[:2], -1), "batch", "seq", None)

    @property
    def _reach(self) -> int:
        return self.hash.size * (self.conv_width - 1)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> NgramCache:
        """Makes an empty cache; its size does not depend on `capacity`."""
        tokens = jnp.full((batch, self.hash.size - 1), self.end, jnp.int32)
        return NgramCache(tokens, jnp.zeros((batch, self._reach, self.streams * self.dim), dtype))

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of convolution inputs that devices pass on in a training step."""
        return {"collective-permute": split.passes * split.rows * self._reach * self.streams * self.dim * split.width}


class _History:
    """New tokens after the last ones of a cache, `B U+T ...`."""

    def __init__(self, new: Array, tail: Array | None, reach: int):
        tail = jnp.zeros((new.shape[0], reach, *new.shape[2:]), new.dtype) if tail is None else tail.astype(new.dtype)
        self.joined, self.reach = jnp.concatenate([tail, new], axis=1), reach

    def before(self, lag: int, ctx: Context, outside: int) -> Array:
        """Returns what is `lag` places before each token, `outside` where its document has none."""
        start, tokens = self.reach - lag, ctx.index.shape[1]
        inside = ctx.index - ctx.start >= lag
        inside = inside.reshape(*inside.shape, *[1] * (self.joined.ndim - 2))
        return jnp.where(inside, self.joined[:, start : start + tokens], outside)

    def tail(self, ctx: Context) -> Array:
        """Returns the last real tokens of each row."""
        rows = jnp.arange(self.joined.shape[0])[:, None]
        return self.joined[rows, ctx.num_new[:, None] + jnp.arange(self.reach)[None]]
