"""Rows of hashed n-grams in a table of embeddings (Qwen3.8-Flash-Next 2026): products of 63 bits by arithmetic of 32.

Shapes: B rows, T tokens, M n-gram heads.
"""

import functools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int64

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
