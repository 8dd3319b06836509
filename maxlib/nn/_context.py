"""What all layers of a model share in one forward pass, computed once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree, static
from maxlib.ops._attention import Mask, Tokens, key_intervals
from maxlib.ops._grid_rope import GridRope
from maxlib.ops._rope import Rope
from maxlib.sharding.layers import can_zigzag, unzigzag, zigzag


@pytree
class Context:
    """Positions, documents and cache state of a batch, with key intervals and rotary tables.

    Masks, windows and states go by a token's order in its row (`index`, `start`, `stop`), rotary tables by `positions`.

    Args:
        positions: `B T`, or `B T R` for rotary embeddings of R rows (M-RoPE). For rotary tables only.
        index: `B T`, each token's place among all cached and new ones.
        start: `B T`, where its document begins in the same counting.
        stop: `B T`, where its document ends; padding has `start == stop`.
        length: `B`, tokens cached before this call (zeros without a cache).
        num_new: `B`, real tokens in this call.
        valid: `B T`, or None if every token is real.
        bidirectional_blocks: Start and stop of the run in which each token sees both ways.
        intervals: Key intervals of `masks`.
        tables: Cosines and sines of `ropes`.
        tokens: `B T`, ids for layers that hash or look them up; None unless the model hands them on.
        next_position_offset: `B`, what the cache keeps as `position_offset`; None if positions count tokens.
        row_length: `B`, with a cache the length of each row after this call, which rotary scalings that depend on the
            length follow.
        rope_length: The length that they assume instead where it is known before.
        masks: Masks whose intervals were computed ahead.
        ropes: Rotary embeddings whose tables were computed ahead.
        zigzag: True if tokens stand in the order of `sharding.layers.zigzag`.
    """

    positions: Int[Array, "B T *R"]
    index: Int[Array, "B T"]
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    length: Int[Array, " B"]
    num_new: Int[Array, " B"]
    valid: Bool[Array, "B T"] | None = None
    bidirectional_blocks: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None
    intervals: tuple[Any, ...] = ()
    tables: tuple[Any, ...] = ()
    row_length: Int[Array, " B"] | None = None
    tokens: Int[Array, "B T"] | None = None
    next_position_offset: Int[Array, " B"] | None = None
    rope_length: int | None = static(default=None)
    masks: tuple[Mask, ...] = static(default=())
    ropes: tuple[Rope | GridRope, ...] = static(default=())
    zigzag: bool = static(default=False)

    @property
    def is_start(self) -> Bool[Array, "B T"]:
        """True for the first token of a document, where a layer with a state begins anew."""
        first = self.index == self.start
        return first if self.valid is None else first & self.valid

    def bounds(self, mask: Mask) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Returns the key interval of every query under `mask`."""
        if mask in self.masks:
            return self.intervals[self.masks.index(mask)]
        bidirectional_blocks = self.bidirectional_blocks or (None, None)
        return key_intervals(mask, Tokens(self.index, self.start, self.stop, *bidirectional_blocks))

    def rotary(self, rope: Rope | GridRope) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
        """Returns cosines and sines of every position under `rope` (R is half the rotary dimensions)."""
        if rope in self.ropes:
            return self.tables[self.ropes.index(rope)]
        return rope.tables(self.positions, length=self.row_length if self.rope_length is None else self.rope_length)


def context(
    batch: int,
    seq: int,
    *,
    positions: Int[Array, "B T *R"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    bidirectional_blocks: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    cache: Any = None,
    tokens: Int[Array, "B T"] | None = None,
    masks: tuple[Mask, ...] = (),
    ropes: tuple[Rope | GridRope, ...] = (),
) -> Context:
    """Builds the context of `batch` rows of `seq` tokens.

    Args:
        batch: Rows.
        seq: Tokens in a row, with padding.
        positions: `B T`, or `B T R` where a rotary embedding has R rows; by default places in the document.
        segment_ids: `B T`, the packed document of each token, 0 for padding.
        valid: `B T`, False for padding, which may stand left or right; with a cache only right.
        bidirectional_blocks: `[start, stop)` of the run in which each token sees both ways.
        cache: The model's cache. What it knows of positions (`position_offset`) moves the default ones.
        tokens: `B T`, ids for layers that ask for them.
        masks: Masks to compute ahead; a layer that asks for another gets it computed on the spot.
        ropes: Rotary embeddings to compute ahead.

    Raises:
        ValueError: segment_ids come with a cache (packing is for training), or an input has another shape.
    """
    if cache is not None and segment_ids is not None:
        raise ValueError("segment_ids cannot be combined with a cache: give each document a row of its own")
    inputs = {"segment_ids": segment_ids, "valid": valid, "tokens": tokens}
    _check_rows(batch, seq, cache, inputs, positions)
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
        row_length=None if cache is None else length + num_new,
        tokens=tokens,
        next_position_offset=_next_offset(positions, valid, length + num_new, cache),
        rope_length=_rope_length(seq, positions, segment_ids, cache),
    )
    tables = tuple(ctx.rotary(rope) for rope in ropes)
    intervals = tuple(ctx.bounds(mask) for mask in masks)
    return dataclasses.replace(ctx, intervals=intervals, tables=tables, masks=tuple(masks), ropes=tuple(ropes))


def _positions(places: Int[Array, "B T"], cache: Any) -> Int[Array, "B T"]:
    offset = None if cache is None else cache.position_offset
    return places if offset is None else places + offset[:, None]


def _next_offset(positions, valid, length, cache) -> Int[Array, " B"] | None:
    """Computes by how much positions run ahead of the `length` tokens that are cached after this call."""
    if cache is None or cache.position_offset is None or positions is None:
        return None if cache is None else cache.position_offset
    positions = positions if positions.ndim == 2 else positions.max(axis=2)  # B T R -> B T: the next one is behind all
    last = (positions if valid is None else jnp.where(valid, positions, -1)).max(axis=1)
    return jnp.where(last < 0, cache.position_offset, last + 1 - length).astype(jnp.int32)


def _check_rows(batch: int, seq: int, cache: Any, inputs: dict[str, Any], positions: Any) -> None:
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


def zigzag_shard(x: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], Context]:
    """Reorders tokens so that all devices of a context axis have the same work, where the rules in use have one."""
    if not can_zigzag(x.shape[1]):
        return x, ctx
    turn = lambda y: zigzag(y, "batch", "seq", *[None] * (y.ndim - 2)) if y.ndim > 1 else y
    return turn(x), dataclasses.replace(jax.tree.map(turn, ctx), zigzag=True)


def zigzag_unshard(x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T D"]:
    """Undoes `zigzag_shard`."""
    return unzigzag(x, "batch", "seq", None) if ctx.zigzag else x


def bidirectional_blocks(
    inside: Bool[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None, cache: Any = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Finds the run of `inside` tokens around each, within its document, as `context` takes it; others stand alone."""
    place = jnp.broadcast_to(jnp.arange(inside.shape[1], dtype=jnp.int32), inside.shape)
    runs = jnp.where(inside, 1 if segment_ids is None else segment_ids, 0)
    start, stop = _segment_bounds(place, runs)
    first = 0 if cache is None else cache.length[:, None]
    return jnp.where(runs > 0, start, place) + first, jnp.where(runs > 0, stop, place + 1) + first


def _documents(batch, seq, segment_ids, valid, cache):
    place = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    if cache is not None:
        index = place + cache.length[:, None]
        num_new = seq if valid is None else valid.sum(axis=1, dtype=jnp.int32)[:, None]
        stop = jnp.broadcast_to(cache.length[:, None] + num_new, index.shape)
        start = jnp.zeros_like(index)
        if valid is not None:
            start = jnp.where(valid, start, stop)
        return index, start, stop, valid
    if segment_ids is None and valid is None:
        return place, jnp.zeros_like(place), jnp.full_like(place, seq), None
    if segment_ids is None:
        segment_ids = valid.astype(jnp.int32)
    elif valid is not None:
        segment_ids = jnp.where(valid, segment_ids, 0)
    return place, *_segment_bounds(place, segment_ids), segment_ids > 0


def _segment_bounds(place, segment_ids):
    """Returns start and stop of the run of equal ids around each token; padding gets an empty one."""
    edge = jnp.ones((place.shape[0], 1), bool)
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.concatenate([edge, change], axis=1)
    last = jnp.concatenate([change, edge], axis=1)
    start = jax.lax.cummax(jnp.where(first, place, 0), axis=1)
    stop = jax.lax.cummin(jnp.where(last, place + 1, place.shape[1]), axis=1, reverse=True)
    return start, jnp.where(segment_ids > 0, stop, start)


def _rope_length(seq, positions, segment_ids, cache):
    """Returns the static length that rotary tables may rely on; None leaves it to the positions."""
    if cache is not None:
        return cache.rope_length
    return seq if positions is None and segment_ids is None else None
