"""The context: values that all layers share in a forward pass, computed once.

Shapes: B rows, T tokens, R rows of M-RoPE positions. A row may hold several documents (packing).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Real

from maxlib.nn._pytree import pytree, static
from maxlib.ops import AxialRope, GridRope, Mask, MaskHint, MRope, Rope, StaticMask, TokenPositions, key_intervals
from maxlib.sharding.layers import can_zigzag, unzigzag, zigzag

AnyRope = Rope | GridRope | MRope | AxialRope
# Maps the indices of queries, `B T`, and of keys, `S`, to what is added to the scores, `B N T S`.
PositionBias = Callable[[Int[Array, "B T"], Int[Array, " S"]], Float[Array, "B N T S"]]


@pytree
class Encoded:
    """Output of an encoder, to which the layers of a decoder attend (`CrossAttention`).

    Args:
        hidden: `B S D`, a vector for each token of the other sequence.
        segment_ids: `B S`, the packed document of each vector, in increasing order and numbered as those of the
            decoder's tokens are; 0 for padding. None if each row is one document without padding.
    """

    hidden: Float[Array, "B S D"]
    segment_ids: Int[Array, "B S"] | None = None


@pytree
class Context:
    """Positions, documents and cache state of a batch, with key intervals and rotary tables.

    Masks, windows and recurrent states use a token's index in its row (`index`, `start`, `stop`); rotary tables use
    `positions`.

    Args:
        positions: `B T`, or `B T R` for rotary embeddings of R rows (M-RoPE). Only rotary tables use them.
        index: `B T`, index of each token among the cached and new tokens of its row.
        start: `B T`, index of the first token of its document.
        stop: `B T`, one past the index of the last token of its document; padding has `start == stop`.
        length: `B`, tokens cached before this call (zeros without a cache).
        num_new: `B`, real tokens in this call.
        valid: `B T`, False for padding; None if every token is real.
        bidirectional_blocks: Start and stop of the block in which each token attends in both directions.
        intervals: Key intervals of `masks`.
        tables: Cosines and sines of `ropes`.
        tokens: `B T`, ids for layers that hash or look them up; None unless the model passes them on.
        features: `B T n D`, vectors that a model adds to tokens after some layers (`Decoder.layer_inputs`); None inside
            layers.
        position_bias: `B N T S`, added to the scores of self-attention; B is 1 if it is the same for all rows.
        encoded: Output of an encoder; None without one, or if caches have its keys and values.
        encoded_interval: `B T` each, the first vector of `encoded` that belongs to a token's document, and one past the
            last.
        next_position_offset: `B`, the next `position_offset` of the cache; None if positions count tokens.
        rope_length: Length of every document for length-dependent rotary scalings, if it is known in advance; None if
            each document has a length of its own.
        masks: Masks whose intervals are computed in advance.
        ropes: Rotary embeddings whose tables are computed in advance.
        zigzag: True if tokens are in the order of `sharding.layers.zigzag`.
        packed: True if rows may hold several documents, or padding.
    """

    positions: Real[Array, "B T *R"]
    index: Int[Array, "B T"]
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    length: Int[Array, " B"]
    num_new: Int[Array, " B"]
    valid: Bool[Array, "B T"] | None = None
    bidirectional_blocks: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None
    intervals: tuple[Any, ...] = ()
    tables: tuple[Any, ...] = ()
    tokens: Int[Array, "B T"] | None = None
    features: Float[Array, "B T n D"] | None = None
    position_bias: Float[Array, "#B N T S"] | None = None
    encoded: Encoded | None = None
    encoded_interval: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None
    next_position_offset: Real[Array, " B"] | None = None
    rope_length: int | None = static(default=None)
    masks: tuple[Mask, ...] = static(default=())
    ropes: tuple[AnyRope, ...] = static(default=())
    zigzag: bool = static(default=False)
    packed: bool = static(default=False)

    @property
    def is_start(self) -> Bool[Array, "B T"]:
        """Returns True for the first token of a document, where a layer resets its state."""
        first = self.index == self.start
        return first if self.valid is None else first & self.valid

    def key_intervals(self, mask: Mask) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Returns the first key of every query under `mask` and one past its last key, `B T` each."""
        # Masks compare by value: layers with equal masks share their intervals.
        if mask in self.masks:
            return self.intervals[self.masks.index(mask)]
        return key_intervals(mask, self._tokens)

    def mask_hint(self, mask: Mask, cache: Any = None) -> MaskHint | None:
        """Returns the static description of `mask` for `attend`; with a cache, for queries against its keys."""
        # Without blocks in this batch, the part of the mask that allows them has no effect.
        mask = mask if self.bidirectional_blocks is not None else mask.without_blocks
        if (static := mask.static) is None:
            return None
        if cache is not None:
            return self._hint_with_cache(mask, static, cache)
        segmented = static.segmented or self.packed
        static = dataclasses.replace(static, segmented=segmented, aligned=not self.zigzag)
        ids = mask.segments(self._tokens) if segmented else None
        return MaskHint(static, None if ids is None else (ids, ids))

    def _hint_with_cache(self, mask: Mask, static: StaticMask, cache: Any) -> MaskHint | None:
        if (order := cache.key_order(self)) is None:
            return None
        if order.index is None:
            return MaskHint(StaticMask("causal"))
        # A row of a cache is one document. The intervals of its padding are empty, which kernels see without segments.
        static = dataclasses.replace(static, segmented=static.segmented or order.has_gap, aligned=False)
        if not static.segmented:
            return MaskHint(static)
        # Slots in front of the first token are segments of no query.
        start = jnp.where(order.index < 0, -1, 0)
        keys = TokenPositions(order.index, start, jnp.maximum(order.index + 1, start))
        return MaskHint(static, (mask.segments(self._tokens), mask.segments(keys)))

    @property
    def _tokens(self) -> TokenPositions:
        return TokenPositions(self.index, self.start, self.stop, *(self.bidirectional_blocks or (None, None)))

    def rotary(self, rope: AnyRope) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
        """Returns cosines and sines of every position under `rope`, `B T R` each (R is half the rotary dimensions)."""
        if rope in self.ropes:
            return self.tables[self.ropes.index(rope)]
        depends = rope.needs_length and self.rope_length is None
        return rope.tables(self.positions, length=self._document_length() if depends else self.rope_length)

    def _document_length(self) -> Int[Array, "B T"]:
        """Returns the length of each token's document, cached tokens included: its largest position + 1."""
        positions = self.positions if self.positions.ndim == 2 else self.positions.max(axis=2)

        def lengths(positions, start):
            # [T]: each document's length at the place of its first token; padding is a run by itself.
            return jnp.zeros_like(positions).at[start].max(positions + 1)[start]

        return jax.vmap(lengths)(positions, self.start)


def make_context(
    batch: int,
    seq: int,
    *,
    positions: Real[Array, "B T *R"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    bidirectional_blocks: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    cache: Any = None,
    tokens: Int[Array, "B T"] | None = None,
    features: Float[Array, "B T n D"] | None = None,
    position_bias: PositionBias | None = None,
    encoded: Encoded | None = None,
    masks: tuple[Mask, ...] = (),
    ropes: tuple[AnyRope, ...] = (),
) -> Context:
    """Builds the context of `batch` rows of `seq` tokens.

    Args:
        batch: Number of rows.
        seq: Tokens in a row, padding included.
        positions: `B T`, or `B T R` for a rotary embedding of R rows; by default each token's index in its document.
        segment_ids: `B T`, the packed document of each token, 0 for padding.
        valid: `B T`, False for padding on the left or right; with a cache only on the right.
        bidirectional_blocks: `[start, stop)` of the block in which each token attends in both directions.
        cache: Cache of the model. Its `position_offset` shifts the default positions.
        tokens: `B T`, ids for layers that use them.
        features: `B T n D`, vectors that a model adds to tokens after some layers.
        position_bias: Computes what is added to the scores of self-attention, such as `nn.ALiBi`.
        encoded: Output of an encoder, for layers with cross-attention.
        masks: Masks to compute in advance; others are computed when a layer asks for them.
        ropes: Rotary embeddings to compute in advance.

    Raises:
        ValueError: when an input has a wrong shape; when a cache is combined with segment_ids, left padding or too many
            tokens, or does not keep every key and there is a position bias; when the rows of `encoded` are not those of
            the tokens.
    """
    _check_rows(batch, seq, cache, {"segment_ids": segment_ids, "valid": valid, "tokens": tokens}, positions)
    # Tokens before this call; `index` counts on from them.
    length = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
    index, start, stop, valid = _documents(batch, seq, segment_ids, valid, cache)
    num_new = jnp.full(batch, seq, jnp.int32) if valid is None else valid.sum(axis=1, dtype=jnp.int32)
    ctx = Context(
        positions=_positions(index - start, cache) if positions is None else positions,
        index=index,
        start=start,
        stop=stop,
        length=length,
        num_new=num_new,
        valid=valid,
        bidirectional_blocks=bidirectional_blocks,
        tokens=tokens,
        features=features,
        position_bias=None if position_bias is None else _position_bias(position_bias, index, cache),
        encoded=encoded,
        encoded_interval=None if encoded is None else _encoded_interval(encoded, batch, seq, segment_ids, valid),
        next_position_offset=_next_offset(positions, valid, length + num_new, cache),
        rope_length=_rope_length(seq, positions, packed=valid is not None, cache=cache),
        packed=valid is not None,
    )
    # Computed here, once for all layers: inside a scan every layer would compute them again.
    tables = tuple(ctx.rotary(rope) for rope in ropes)
    intervals = tuple(ctx.key_intervals(mask) for mask in masks)
    return dataclasses.replace(ctx, intervals=intervals, tables=tables, masks=tuple(masks), ropes=tuple(ropes))


def _position_bias(bias: PositionBias, index: Int[Array, "B T"], cache: Any) -> Float[Array, "#B N T S"]:
    """Computes the bias once for all layers: between the tokens, or between them and the slots of a cache."""
    if cache is None:
        # Distances within a document are those within its row.
        keys = jnp.arange(index.shape[1], dtype=jnp.int32)
        return bias(keys[None], keys)
    if cache.capacity is None:
        raise ValueError("a position bias needs a cache that keeps every key; this model's layers have sliding windows")
    return bias(index, jnp.arange(cache.capacity, dtype=jnp.int32))


def _encoded_interval(
    encoded: Encoded,
    batch: int,
    seq: int,
    segment_ids: Int[Array, "B T"] | None,
    valid: Bool[Array, "B T"] | None,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns, for each token, the vectors of its document in `encoded`; an empty interval for padding."""
    if len(encoded.hidden) != batch:
        raise ValueError(
            f"the encoder's output must have a row for each of the {batch} rows of tokens, got {len(encoded.hidden)}"
        )
    if segment_ids is not None and encoded.segment_ids is None:
        raise ValueError(
            "the tokens have segment_ids, so the encoder's output needs them too: give both sides of a document one number"
        )
    ids = jnp.ones((batch, seq), jnp.int32) if segment_ids is None else segment_ids
    ids = ids if valid is None else jnp.where(valid, ids, 0)
    if encoded.segment_ids is None:
        start, end = jnp.zeros_like(ids), jnp.full_like(ids, encoded.hidden.shape[1])
    else:
        # Ids increase along a row; padding counts as part of the document before it, or of the one after it.
        from_left = jax.lax.cummax(encoded.segment_ids, axis=1)
        no_padding = jnp.where(encoded.segment_ids > 0, encoded.segment_ids, jnp.iinfo(jnp.int32).max)
        from_right = jax.lax.cummin(no_padding, axis=1, reverse=True)
        start = jax.vmap(jnp.searchsorted)(from_left, ids).astype(jnp.int32)
        end = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(from_right, ids).astype(jnp.int32)
    is_real = (ids > 0) & (start < end)
    # Empty intervals begin where the last one ended, so that bounds do not decrease along the row.
    last = jax.lax.cummax(jnp.where(is_real, end, 0), axis=1)
    return jnp.where(is_real, start, last), jnp.where(is_real, end, last)


def context_of(x: Float[Array, "B T D"], ctx: Context | None) -> Context:
    """Returns `ctx`, or for None a context in which each row of `x` is one document from position 0.

    Args:
        x: Input of a layer, `B T D`.
        ctx: Context that the layer was called with, or None.

    Raises:
        ValueError: when `x` is not of shape `B T D`.
        TypeError: when `ctx` is neither a context nor None.
    """
    check_is_rows(x)
    if ctx is None:
        return make_context(*x.shape[:2])
    if not isinstance(ctx, Context):
        raise TypeError(
            f"ctx must come from nn.make_context(B, T), or be None, got {type(ctx).__name__}; a mask is an argument of the "
            "layer's constructor, mask=ops.Causal()"
        )
    return ctx


def check_prefix(q: Float[Array, "B T N H"], mask: Mask, ctx: Context) -> Float[Array, "B T N H"]:
    """Returns queries, NaN in rows whose cache ends inside the prefix of `mask`.

    Raises:
        ValueError: for such rows outside jit.
    """
    if not mask.prefix:
        return q
    # The cached tokens of the prefix could not attend to the new ones.
    is_split = (ctx.length > 0) & (ctx.length < mask.prefix) & (ctx.num_new > 0)
    if is_known(is_split) and is_split.any():
        raise ValueError(
            f"with a cache, the first call must have the whole prefix of {mask.prefix} tokens, which attend to each "
            f"other, but the rows have {np.asarray(ctx.length).tolist()} cached tokens: give the prefix in one call"
        )
    return jnp.where(is_split[:, None, None, None], jnp.nan, q)


def check_is_rows(x: Array) -> None:
    """Raises ValueError unless `x` has three axes, `B T D`, none of which is empty."""
    if x.ndim != 3 or not x.size:
        raise ValueError(f"x must be rows of tokens `B T D`, got x of shape {x.shape}; one row is x[None]")


def _check_right_padded(valid: Any) -> None:
    """Raises ValueError for padding before a token, which a cache cannot store; checks nothing inside jit."""
    if valid is None or not is_known(valid):
        return
    valid = np.asarray(valid)
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise ValueError(
            "with a cache, padding must come after a row's tokens, got valid=False before True: token t of a row is stored "
            "t slots after the cached ones; shift the rows to the left"
        )


def is_known(x: Any) -> bool:
    """Returns True if an array's values can be read: it is not traced, and fully addressable on this host."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _positions(indices: Int[Array, "B T"], cache: Any) -> Real[Array, "B T"]:
    """Returns the default positions: indices in the document, shifted by the cache's offset."""
    offset = None if cache is None else cache.position_offset
    return indices if offset is None else indices + offset[:, None]


def _next_offset(positions, valid, length, cache) -> Real[Array, " B"] | None:
    """Computes the difference between the next position and the `length` tokens that are cached after this call."""
    if cache is None or cache.position_offset is None or positions is None:
        return None if cache is None else cache.position_offset
    positions = positions if positions.ndim == 2 else positions.max(axis=2)  # B T R -> B T: the largest row
    # [B, T] -> [B]: the last real position; -1 for a row of only padding, whose offset does not change.
    last = (positions if valid is None else jnp.where(valid, positions, -1)).max(axis=1)
    return jnp.where(last < 0, cache.position_offset, last + 1 - length).astype(cache.position_offset.dtype)


def _check_rows(batch: int, seq: int, cache: Any, inputs: dict[str, Any], positions: Any) -> None:
    """Raises ValueError for inputs that do not have the shape of the tokens, or that cannot be combined with a cache.

    A cache does not support packed rows. Left padding and rows that are too long are only detected outside jit.
    """
    if cache is not None and inputs["segment_ids"] is not None:
        raise ValueError("segment_ids cannot be combined with a cache: give each document a row of its own")
    shapes = {name: value.shape for name, value in inputs.items() if value is not None}
    if positions is not None:
        shapes["positions"] = positions.shape[:2] if positions.ndim == 3 else positions.shape
    for name, shape in shapes.items():
        if shape != (batch, seq):
            raise ValueError(f"{name} must have the shape of the tokens, {(batch, seq)}, got {shape}")
    if cache is not None and len(cache.length) != batch:
        raise ValueError(
            f"the cache must have as many rows as the tokens, {batch}, got {len(cache.length)}: make it with "
            f"init_cache({batch}, ...)"
        )
    if cache is not None:
        valid = inputs["valid"]
        _check_right_padded(valid)
        cache.check_room(jnp.full(batch, seq) if valid is None else valid.sum(axis=1))


# True where values of layers are read or replaced (`nn.capture`, `nn.patch`), so that these are in natural order.
natural_order = jax.make_user_context(False)


def zigzag_shard(x: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], Context]:
    """Reorders tokens so that all devices of a context axis have equal work under a causal mask.

    Device i of n gets pieces i and 2n - 1 - i of 2n: one with few keys before it, one with many. Does nothing unless
    the layout splits sequences.

    Args:
        x: Activations, `B T D`.
        ctx: Their context.

    Returns:
        `x` and `ctx` in the new order.
    """
    if natural_order.value or not can_zigzag(x.shape[1]):
        return x, ctx

    def reorder(y: Array) -> Array:
        # Arrays of the context that have a token axis, [B, T, ...], too, but not those of rows, [B].
        return zigzag(y, "batch", "seq", *[None] * (y.ndim - 2)) if y.ndim > 1 else y

    return reorder(x), dataclasses.replace(jax.tree.map(reorder, ctx), zigzag=True)


def zigzag_unshard(x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T D"]:
    """Puts tokens back into their natural order."""
    return unzigzag(x, "batch", "seq", None) if ctx.zigzag else x


def bidirectional_blocks(
    inside: Bool[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None, cache: Any = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Finds the block of consecutive `inside` tokens that contains each token, within its document.

    Args:
        inside: True for tokens of a block, such as those of an image.
        segment_ids: Packed document of each token, or None.
        cache: Cache of the model, whose tokens come before these.

    Returns:
        Start and stop of each token's block; a token that is not `inside` is a block by itself.
    """
    column = jnp.broadcast_to(jnp.arange(inside.shape[1], dtype=jnp.int32), inside.shape)
    # Adjacent blocks of different documents have different ids; tokens outside any block have 0.
    runs = jnp.where(inside, 1 if segment_ids is None else segment_ids, 0)
    start, stop = _segment_bounds(column, runs)
    first = 0 if cache is None else cache.length[:, None]
    return jnp.where(runs > 0, start, column) + first, jnp.where(runs > 0, stop, column + 1) + first


def first_of_segment(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns, for each token, the column of the first token of its document."""
    place = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    return _segment_bounds(place, segment_ids)[0]


def _documents(batch, seq, segment_ids, valid, cache):
    """Returns `index`, `start`, `stop` and `valid` of each token."""
    column = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    if cache is not None:
        # A row of a cache is one document: all cached tokens, then the new ones.
        index = column + cache.length[:, None]
        num_new = seq if valid is None else valid.sum(axis=1, dtype=jnp.int32)[:, None]
        stop = jnp.broadcast_to(cache.length[:, None] + num_new, index.shape)
        start = jnp.zeros_like(index)
        if valid is not None:
            # Padding gets an empty interval, so it attends to nothing.
            start = jnp.where(valid, start, stop)
        return index, start, stop, valid
    if segment_ids is None and valid is None:
        return column, jnp.zeros_like(column), jnp.full_like(column, seq), None
    if segment_ids is None:
        segment_ids = valid.astype(jnp.int32)
    elif valid is not None:
        # Padding inside a packed row belongs to no document: id 0.
        segment_ids = jnp.where(valid, segment_ids, 0)
    return column, *_segment_bounds(column, segment_ids), segment_ids > 0


def _segment_bounds(column, segment_ids):
    """Returns start and stop of the run of equal ids that contains each token; padding gets an empty interval."""
    edge = jnp.ones((column.shape[0], 1), bool)
    # [B, T - 1]: True between two tokens of different documents.
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.concatenate([edge, change], axis=1)
    last = jnp.concatenate([change, edge], axis=1)
    # Running maximum of the starts so far; from the right, running minimum of the stops.
    start = jax.lax.cummax(jnp.where(first, column, 0), axis=1)
    stop = jax.lax.cummin(jnp.where(last, column + 1, column.shape[1]), axis=1, reverse=True)
    return start, jnp.where(segment_ids > 0, stop, start)


def _rope_length(seq, positions, *, packed, cache):
    """Returns the length of every document if it is known in advance."""
    if cache is not None:
        return cache.rope_length
    return seq if positions is None and not packed else None
