"""Masks as per-query key intervals.

A mask gives each query `i` the keys that it attends to, as one interval `[k_start, k_end)`. Small frozen specs combine
(`Causal() & SlidingWindow(4096)`) and lower to two int32 arrays once per forward pass. Every implementation reads the
same two arrays and skips tiles outside the intervals. No mask of shape T x S is ever made.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Interval = tuple[Int[Array, "B T"], Int[Array, "B T"]]


@dataclasses.dataclass(frozen=True)
class TokenPositions:
    """Position and document of each query: all fields are indices into the key array, shape `B T`.

    Args:
        index: The query's own key.
        start: First key of its document.
        stop: One past the last key of its document; `stop <= start` marks padding.
        span_start: First token of the query's bidirectional span (an image, a prefix); its own index if it has none.
            None if no query has one.
        span_stop: One past the last token of that span.
    """

    index: Int[Array, "B T"]
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    span_start: Int[Array, "B T"] | None = None
    span_stop: Int[Array, "B T"] | None = None


@dataclasses.dataclass(frozen=True)
class StaticMask:
    """Static description of key intervals, for kernels that take a named mask.

    It promises that query `i` attends to the keys of its own segment in `[k_end[i] - window, k_end[i])`. Other
    implementations use the intervals.

    Args:
        kind: "causal" if intervals end after the query's own key, "full" if they end with the segment, else "any".
        window: Maximum number of keys that a query attends to, including its own; None for no limit. With `kind="full"`
            it only makes sense intersected with a causal mask, and no kernel supports it.
        segmented: True if keys of other segments (packed documents, padding, chunks) are hidden.
        aligned: True if query `i` has the index of key `i` and all keys belong to its row; False with a cache, or if
            the sequence is split over devices.
    """

    kind: Literal["causal", "full", "any"]
    window: int | None = None
    segmented: bool = False
    aligned: bool = False

    def __str__(self) -> str:
        words = ["any ends" if self.kind == "any" else self.kind]
        words += [] if self.window is None else [f"window {self.window}"]
        return ", ".join(words + ["segments"] * self.segmented + ["whole rows"] * self.aligned)


class MaskHint(NamedTuple):
    """Facts about a mask that a kernel may use in addition to its intervals.

    Args:
        static: Description of the intervals at compile time.
        segment_ids: Segments of the queries, `B T`, and of the keys, `B S`, if `static.segmented`.
    """

    static: StaticMask
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None


def _check_tokens(name: str, number: Any) -> None:
    """Raises ValueError unless a number of tokens is an integer of at least 1 (NumPy's integers count)."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < 1:
        raise ValueError(f"{name} must be a whole number of tokens, at least 1, got {number!r}")


class Mask:
    """Base class of masks: a frozen spec that lowers to key intervals; `&` intersects, `|` unites.

    A union is only correct if the two intervals of each query overlap, which holds for all masks here, because each
    interval contains the query itself.
    """

    def interval(self, tokens: TokenPositions) -> Interval:
        """Returns `[k_start, k_end)` for each query, two arrays of shape `B T`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define interval(tokens) -> (k_start, k_end): the first key of each query and one "
            "past its last, `B T`"
        )

    @property
    def ring(self) -> int | None:
        """Returns the number of slots that a ring cache needs for this mask; None if it must keep every key.

        A ring of this size need not be unrolled for a single new token, because the visible slots are one interval.
        """
        return None

    @property
    def prefix(self) -> int:
        """Returns how many first tokens of a document attend to later ones, so that one call must have them all."""
        return 0

    @property
    def block_size(self) -> int:
        """Returns how many tokens of a document attend to each other, so that one call with a cache must have them
        all; 1 if none attends to a later one outside of prefix and spans.
        """
        return 1

    @property
    def static(self) -> StaticMask | None:
        """Returns the static description of the intervals, for rows of one document; None if there is none."""
        return None

    @property
    def without_blocks(self) -> "Mask":
        """Returns the mask without bidirectional blocks, for rows that have none; more kernels support it."""
        return self

    @property
    def has_open_window(self) -> bool:
        """Is True if the mask has a sliding window but lets tokens attend to later ones outside of prefix and blocks.

        Examples are a window without `Causal()`, and a union that undoes a causal mask: `Causal() | SlidingWindow(8)`.
        """
        if not self._has_window:
            return False
        with jax.ensure_compile_time_eval():
            # Test a token in the middle of a document that is longer than any window.
            index, start, stop = (jnp.array([[i]], jnp.int32) for i in (2**29, 0, 2**30))
            return bool((self.interval(TokenPositions(index, start, stop))[1] > index + 1).all())

    @property
    def _has_window(self) -> bool:
        return False

    def segments(self, tokens: TokenPositions) -> Int[Array, "B T"]:
        """Returns a segment id for each token; tokens of different segments never attend to each other."""
        return tokens.start

    def __and__(self, other: "Mask") -> "Mask":
        return _And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _Or(self, other)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Bidirectional mask: every key of the query's own document.

    An encoder has it:

        encoder = nn.Attention(64, num_heads=4, head_dim=16, mask=ops.Full(), rngs=nnx.Rngs(0))
    """

    @property
    def static(self) -> StaticMask:
        return StaticMask("full")

    def interval(self, tokens: TokenPositions) -> Interval:
        return tokens.start, tokens.stop


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Causal mask: the query itself and every earlier key of its document.

    Masks join with `&` and `|`:

        mask = ops.Causal() & ops.SlidingWindow(256)
    """

    @property
    def static(self) -> StaticMask:
        return StaticMask("causal")

    def interval(self, tokens: TokenPositions) -> Interval:
        return tokens.start, tokens.index + 1


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """Sliding window over the past: the keys less than `window` before the query, and every later key.

    Use it as `Causal() & SlidingWindow(window)`: on its own it only limits the past. The window is computed in
    `interval`; every implementation of `ops.attention` gets the resulting first and last key of each query.

        mask = ops.Causal() & ops.SlidingWindow(4096)
        attn = nn.Attention(64, num_heads=4, head_dim=16, mask=mask, rngs=nnx.Rngs(0))

    Args:
        window: Number of keys, including the query's own (Mistral's convention).

    Raises:
        ValueError: When `window` is not an integer of at least 1.
    """

    window: int

    def __post_init__(self):
        _check_tokens("window", self.window)

    @property
    def ring(self) -> int:
        return self.window

    @property
    def static(self) -> StaticMask:
        return StaticMask("full", self.window)

    @property
    def _has_window(self) -> bool:
        return True

    def interval(self, tokens: TokenPositions) -> Interval:
        return jnp.maximum(tokens.start, tokens.index - self.window + 1), tokens.stop


@dataclasses.dataclass(frozen=True)
class LocalWindow(Mask):
    """Window to both sides, for encoders: the keys at most `reach` tokens before or after the query (ModernBERT).

    Args:
        reach: Number of keys on each side.

    Raises:
        ValueError: When `reach` is not an integer of at least 1.
    """

    reach: int

    def __post_init__(self):
        _check_tokens("reach", self.reach)

    def interval(self, tokens: TokenPositions) -> Interval:
        start = jnp.maximum(tokens.start, tokens.index - self.reach)
        return start, jnp.minimum(tokens.stop, tokens.index + self.reach + 1)


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Chunked mask: the keys of the query's own chunk (Llama 4); use as `Causal() & Chunked(n)`.

    Args:
        chunk: Tokens per chunk, counted from the start of the document.

    Raises:
        ValueError: When `chunk` is not an integer of at least 1.
    """

    chunk: int

    def __post_init__(self):
        _check_tokens("chunk", self.chunk)

    @property
    def ring(self) -> int:
        return self.chunk

    @property
    def static(self) -> StaticMask:
        return StaticMask("full", segmented=True)

    def segments(self, tokens: TokenPositions) -> Int[Array, "B T"]:
        return self.interval(tokens)[0]

    def interval(self, tokens: TokenPositions) -> Interval:
        # Round the position within the document down to the first token of its chunk.
        start = tokens.start + (tokens.index - tokens.start) // self.chunk * self.chunk
        return start, jnp.minimum(start + self.chunk, tokens.stop)


@dataclasses.dataclass(frozen=True)
class BlockCausal(Mask):
    """Block-causal mask: the keys of the query's own block and of all earlier ones of its document (block diffusion,
    Arriola et al. 2025, arXiv:2503.09573).

        mask = ops.BlockCausal(32)
        attn = nn.Attention(64, num_heads=4, head_dim=16, mask=mask, rngs=nnx.Rngs(0))

    With a cache, every call must begin at the first token of a block, and have whole blocks but for the last of a text.

    Args:
        block: Tokens per block, counted from the start of the document; with 1 the mask is causal.
        pairs: True if rows come in pairs, a text and then its noisy copy, as block diffusion is trained: a noisy token
            attends to its own noisy block, and to the earlier blocks of the text. `nn.Attention` supports it.

    Raises:
        ValueError: When `block` is not an integer of at least 1.
    """

    block: int
    pairs: bool = False

    def __post_init__(self):
        _check_tokens("block", self.block)

    @property
    def block_size(self) -> int:
        return self.block

    @property
    def static(self) -> StaticMask | None:
        return None if self.pairs else StaticMask("any")

    def interval(self, tokens: TokenPositions) -> Interval:
        """Returns the interval of each query; with `pairs`, of keys in the row of the text."""
        start, stop = Chunked(self.block).interval(tokens)
        if self.pairs:
            # The own block of a noisy token is in its own row, which `nn.Attention` adds.
            is_noisy = jnp.arange(tokens.index.shape[0])[:, None] % 2 == 1
            stop = jnp.where(is_noisy, start, stop)
        return tokens.start, stop


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """Prefix mask: the first `length` tokens of a document attend to each other; use as `Causal() | Prefix(n)`.

    With a cache, the first call must have the whole prefix, because its tokens attend to each other in every layer. A
    later call with a part of it raises an error outside `jit`; inside, its results are NaN.

    Args:
        length: Number of tokens in the prefix.
    """

    length: int

    @property
    def prefix(self) -> int:
        return self.length

    def interval(self, tokens: TokenPositions) -> Interval:
        inside = tokens.index < tokens.start + self.length
        stop = jnp.minimum(tokens.start + self.length, tokens.stop)
        return jnp.where(inside, tokens.start, tokens.index), jnp.where(inside, stop, tokens.index + 1)


@dataclasses.dataclass(frozen=True)
class BidirectionalBlocks(Mask):
    """Bidirectional blocks: the tokens of one span (an image) attend to each other.

    Use it as `Causal() | BidirectionalBlocks()`. `TokenPositions` has the spans.
    """

    def interval(self, tokens: TokenPositions) -> Interval:
        if tokens.span_start is None or tokens.span_stop is None:
            return tokens.index, tokens.index + 1
        return tokens.span_start, tokens.span_stop


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
    """Base class of two masks together."""

    left: Mask
    right: Mask

    @property
    def _has_window(self) -> bool:
        return self.left._has_window or self.right._has_window

    @property
    def prefix(self) -> int:
        return max(self.left.prefix, self.right.prefix)

    @property
    def block_size(self) -> int:
        return max(self.left.block_size, self.right.block_size)


class _And(_Pair):
    @property
    def ring(self) -> int | None:
        rings = [mask.ring for mask in (self.left, self.right) if mask.ring is not None]
        return rings[0] if len(rings) == 1 else None  # rings of two masks do not nest: keep every key

    @property
    def static(self) -> StaticMask | None:
        left, right = self.left.static, self.right.static
        if left is None or right is None or "any" in (left.kind, right.kind):
            return None
        windows = [side.window for side in (left, right) if side.window is not None]
        kind = "causal" if "causal" in (left.kind, right.kind) else "full"
        return StaticMask(kind, min(windows, default=None), left.segmented or right.segmented)

    @property
    def without_blocks(self) -> Mask:
        return self.left.without_blocks & self.right.without_blocks

    def segments(self, tokens: TokenPositions) -> Int[Array, "B T"]:
        return jnp.maximum(self.left.segments(tokens), self.right.segments(tokens))

    def interval(self, tokens: TokenPositions) -> Interval:
        # [a, b) and [c, d): an intersection of intervals is an interval, possibly empty.
        (a, b), (c, d) = self.left.interval(tokens), self.right.interval(tokens)
        return jnp.maximum(a, c), jnp.minimum(b, d)


class _Or(_Pair):
    @property
    def ring(self) -> int | None:
        # A span is always in a single call.
        return self.left.ring if isinstance(self.right, BidirectionalBlocks) else None

    @property
    def static(self) -> StaticMask | None:
        # The union starts at the beginning of the document if one of the two does; windows and chunks do not.
        sides = self.left.static, self.right.static
        reaches_start = any(side is not None and side.window is None and not side.segmented for side in sides)
        return StaticMask("any") if reaches_start else None

    @property
    def without_blocks(self) -> Mask:
        # A token outside of all blocks is a block by itself, and every other mask lets it attend to itself anyway.
        rest = [side.without_blocks for side in (self.left, self.right) if not isinstance(side, BidirectionalBlocks)]
        return rest[0] if len(rest) == 1 else self

    def interval(self, tokens: TokenPositions) -> Interval:
        (a, b), (c, d) = self.left.interval(tokens), self.right.interval(tokens)
        return jnp.minimum(a, c), jnp.maximum(b, d)  # the hull, which is the union if the intervals overlap


def key_intervals(mask: Mask, tokens: TokenPositions) -> Interval:
    """Lowers `mask` to `[k_start, k_end)` per query; padding gets the empty interval `[i, i)`."""
    # [i, i) rather than [0, 0), so that the bounds do not decrease along the row, and tiles stay narrow.
    start, end = mask.interval(tokens)
    empty = tokens.stop <= tokens.start
    return jnp.where(empty, tokens.index, start), jnp.where(empty, tokens.index, end)
