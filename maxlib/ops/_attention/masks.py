"""Masks as per-query key intervals.

Every mask maxlib knows says, for query `i`, which keys it may see as one interval `[k_start, k_end)`.
Small frozen specs combine (`Causal() & SlidingWindow(4096)`) and lower to two int32 arrays once per
forward pass. Every implementation reads the same two arrays, and skips the tiles that they leave out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Interval = tuple[Int[Array, "B T"], Int[Array, "B T"]]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What masks know about each query. All are indices into the key array, shape `B T`.

    index: where the query itself stands. start, stop: its document, `[start, stop)`; padding is a
    document of its own that is empty. span_start, span_stop: the run of tokens that see each other in
    both directions (an image, a prefix); `[index, index + 1)` where there is none.
    """

    index: Int[Array, "B T"]
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    span_start: Int[Array, "B T"] | None = None
    span_stop: Int[Array, "B T"] | None = None


class Mask:
    """A frozen spec that lowers to key intervals; `&` intersects, `|` unites.

    A union is only right where the two intervals of each query overlap (they do for all specs here: each
    contains the query itself). The interval's ends must not decrease along a row, so that the
    transposed intervals of the backward pass exist; all specs here keep that.
    """

    def interval(self, tokens: Tokens) -> Interval:
        raise NotImplementedError

    @property
    def ring(self) -> int | None:
        """How many slots a ring cache needs for this mask; None if it must keep every key.

        A ring of that size never has to be unrolled for a single new token: the visible slots are one interval.
        """
        return None

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, other)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every key of the query's own document."""

    def interval(self, tokens: Tokens) -> Interval:
        return tokens.start, tokens.stop


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """The query itself and what came before it."""

    def interval(self, tokens: Tokens) -> Interval:
        return tokens.start, tokens.index + 1


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """Keys less than `window` before the query (Mistral's convention: the query counts), and every later key.

    Use it as `Causal() & SlidingWindow(window)`: alone it bounds the past only, and each query also sees the future.
    """

    window: int

    def __post_init__(self):
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a whole number of tokens, at least 1, got {self.window!r}")

    @property
    def ring(self) -> int:
        return self.window

    def interval(self, tokens: Tokens) -> Interval:
        return jnp.maximum(tokens.start, tokens.index - self.window + 1), tokens.stop


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Keys of the query's own chunk; chunks of `chunk` tokens count from the document's start (Llama 4)."""

    chunk: int

    def __post_init__(self):
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")

    @property
    def ring(self) -> int:
        return self.chunk

    def interval(self, tokens: Tokens) -> Interval:
        start = tokens.start + (tokens.index - tokens.start) // self.chunk * self.chunk
        return start, jnp.minimum(start + self.chunk, tokens.stop)


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` tokens of a document see each other; use as `Causal() | Prefix(n)`."""

    length: int

    def interval(self, tokens: Tokens) -> Interval:
        inside = tokens.index < tokens.start + self.length
        stop = jnp.minimum(tokens.start + self.length, tokens.stop)
        return jnp.where(inside, tokens.start, tokens.index), jnp.where(inside, stop, tokens.index + 1)


@dataclasses.dataclass(frozen=True)
class BidirectionalBlocks(Mask):
    """The tokens of one span (an image) see each other; use as `Causal() | BidirectionalBlocks()`."""

    def interval(self, tokens: Tokens) -> Interval:
        if tokens.span_start is None or tokens.span_stop is None:
            return tokens.index, tokens.index + 1
        return tokens.span_start, tokens.span_stop


@dataclasses.dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    @property
    def ring(self) -> int | None:
        rings = [mask.ring for mask in (self.left, self.right) if mask.ring is not None]
        return rings[0] if len(rings) == 1 else None  # two rings would not nest: keep every key

    def interval(self, tokens: Tokens) -> Interval:
        (a, b), (c, d) = self.left.interval(tokens), self.right.interval(tokens)
        return jnp.maximum(a, c), jnp.minimum(b, d)


@dataclasses.dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    @property
    def ring(self) -> int | None:
        return (
            self.left.ring if isinstance(self.right, BidirectionalBlocks) else None
        )  # a span arrives whole, in one call

    def interval(self, tokens: Tokens) -> Interval:
        (a, b), (c, d) = self.left.interval(tokens), self.right.interval(tokens)
        return jnp.minimum(a, c), jnp.maximum(b, d)


def key_intervals(mask: Mask, tokens: Tokens) -> Interval:
    """Lowers `mask` to `[k_start, k_end)` per query; padding gets the empty interval `[i, i)`."""
    start, end = mask.interval(tokens)
    empty = tokens.stop <= tokens.start
    return jnp.where(empty, tokens.index, start), jnp.where(empty, tokens.index, end)


def query_intervals(
    k_start: Int[Array, "B T"], k_end: Int[Array, "B T"], num_keys: int
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The transpose: for key `j`, the queries `[q_start, q_end)` that see it (and, in between, empty rows).

    Exact because both ends are non-decreasing along a row. Returns two arrays of shape `B S`.
    """
    keys = jnp.broadcast_to(jnp.arange(num_keys, dtype=jnp.int32), (k_start.shape[0], num_keys))
    count = lambda ends: _count_up_to(ends, keys)
    q_start, q_end = count(k_end), count(k_start)
    return jnp.minimum(q_start, q_end), q_end


def _count_up_to(ends: Int[Array, "B T"], keys: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """For each key `j`, how many entries of the non-decreasing row `ends` are `<= j`."""
    return jax.vmap(lambda row, j: jnp.searchsorted(row, j, side="right").astype(jnp.int32))(ends, keys)
