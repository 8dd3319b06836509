"""Paged caches (Kwon et al. 2023, arXiv:2309.06180): blocks of tokens, which rows take as they grow, and share.

A row has a table of its blocks. Arrays with an entry for each token, or for each few, are stored in blocks; those of a
fixed size, such as rings and recurrent states, in the row's slot. A step reads its rows as caches that are as long as
the longest of them, a view, and stores the new tokens in their blocks. Either each step gathers the view from the
blocks, or it is kept between steps, which takes memory and saves the copying.

Shapes: P blocks of E entries, N blocks of a row, R rows, S slots, M new tokens, K heads of width H.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxlib import nn
from maxlib.inference._generate import empty_cache

NOWHERE = 1 << 30  # a block that does not exist: what is written there is dropped
_BLOCK = 64  # tokens


@nn.pytree
class Caches:
    """Caches of rows: of the model, and of its MTP module if that drafts."""

    model: nn.cache.Cache
    mtp: nn.cache.Cache | None

    def with_length(self, length: Int[Array, " R"]) -> "Caches":
        """Returns caches in which the tokens after `length` are forgotten."""
        mtp = None if self.mtp is None else dataclasses.replace(self.mtp, length=length)
        return Caches(dataclasses.replace(self.model, length=length), mtp)


@dataclasses.dataclass(frozen=True)
class Making:
    """How caches are made; a static argument.

    Attributes:
        capacity: Maximum number of tokens in a row.
        dtype: Dtype of cached values.
        num_drafts: Number of tokens to rewind, for which rings get spare slots.
        mtp: True makes a cache of the MTP module, too.
    """

    capacity: int
    dtype: Any
    num_drafts: int
    mtp: bool

    def caches(self, model: Any, rows: int) -> Caches:
        """Returns empty caches."""
        cache = self._rewindable(empty_cache(model, rows, min(self.capacity, most_tokens(model)), self.dtype))
        if not self.mtp:
            return Caches(cache, None)
        return Caches(cache, self._rewindable(model.init_draft_cache(rows, self.capacity, dtype=self.dtype)))

    def shapes(self, model: Any) -> Caches:
        """Returns the shapes of the caches of one row."""
        return jax.eval_shape(lambda: self.caches(model, 1))

    def _rewindable(self, cache: nn.cache.Cache) -> nn.cache.Cache:
        # A drafter attends to one key more than the window has.
        layers = nn.cache.make_rewindable(cache.layers, self.num_drafts + 1) if self.num_drafts else cache.layers
        return dataclasses.replace(cache, layers=layers)


@dataclasses.dataclass(frozen=True)
class Entries:
    """How an array of caches holds the tokens of a row; a static argument.

    Attributes:
        axis: The axis of entries: 1, or 2 behind the heads.
        tokens: Tokens of an entry.
    """

    axis: int
    tokens: int

    @classmethod
    def of(cls, shape: tuple[int, ...], longer: tuple[int, ...], capacity: int) -> "Entries | None":
        """Returns them for an array with a shape at `capacity` tokens and at more; None if these are equal."""
        axes = [axis for axis, (size, other) in enumerate(zip(shape, longer, strict=True)) if size != other]
        return cls(axes[0], capacity // shape[axes[0]]) if axes else None


@dataclasses.dataclass(frozen=True)
class Paging:
    """How caches are stored; a static argument.

    Attributes:
        block: Tokens of a block.
        entries: How each array of the caches holds tokens; None for an array that is not stored in blocks.
    """

    block: int
    entries: tuple[Entries | None, ...]

    @classmethod
    def of(cls, model: Any, making: Making) -> "Paging":
        """Returns how the caches of rows of up to `making.capacity` tokens are stored."""
        # Here all windows are rings, and the number of entries says the rate.
        half = most_tokens(model) // 2
        long, longer = (dataclasses.replace(making, capacity=n).shapes(model) for n in (half, 2 * half))
        arrays = zip(jax.tree.leaves(long), jax.tree.leaves(longer), strict=True)
        # A window that is longer than all rows has an entry for each token instead.
        is_ring, becomes_ring = (_belong_to(caches, nn.cache.RingCache) for caches in (making.shapes(model), long))
        entries = [
            Entries(axis=2, tokens=1) if turns and not ring else Entries.of(x.shape, y.shape, half)
            for (x, y), ring, turns in zip(arrays, is_ring, becomes_ring, strict=True)
        ]
        return cls(math.lcm(_BLOCK, *(each.tokens for each in entries if each)), tuple(entries))

    def empty_row(self, model: Any, making: Making, num_blocks: int) -> Caches:
        """Returns empty caches of a row with room for `num_blocks`."""

        def fit(x: Array, entries: Entries | None) -> Array:
            if entries is None:
                return x
            size, axis = num_blocks * self.block // entries.tokens, entries.axis
            missing = max(size - x.shape[axis], 0)  # of the last block, where the model's positions end in it
            x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
            return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])

        caches = making.caches(model, 1)
        return self._map(fit, caches).with_length(caches.model.length)  # which is known

    def empty(self, row: Caches, slots: int, num_blocks: int) -> Caches:
        """Returns the empty storage of rows with the shapes of `row`."""

        def zeros(x: Array, entries: Entries | None) -> Array:
            if entries is None:
                return jnp.zeros((slots, *x.shape[1:]), x.dtype)
            before, after = x.shape[1 : entries.axis], x.shape[entries.axis + 1 :]
            return jnp.zeros((num_blocks, *before, self.block // entries.tokens, *after), x.dtype)

        return self._map(zeros, row)

    def read(self, stored: Caches, tables: Int[Array, "R N"], slots: Int[Array, " R"] | None) -> Caches:
        """Returns the caches of rows as a model reads them; `slots` is None for those of all slots."""

        def gather(x: Array, entries: Entries | None) -> Array:
            if entries is None:
                return of_slots(x, slots)
            if entries.axis == 1:
                rows = x.at[tables].get(mode="clip")  # [P, E, ...] -> [R, N, E, ...]
                return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
            # [P, K, E, H] -> [R, K, N, E, H], in this order: a transposition would be another copy.
            rows = x.at[tables[:, None], jnp.arange(x.shape[1])[:, None]].get(mode="clip")
            return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])

        return self._map(gather, stored)

    def view(self, caches: Caches) -> list[Array]:
        """Returns those arrays of caches that are stored in blocks."""
        return [x for x, entries in zip(jax.tree.leaves(caches), self.entries, strict=True) if entries]

    def with_view(self, stored: Caches, view: list[Array], slots: Int[Array, " R"] | None) -> Caches:
        """Returns the caches of rows whose blocks are gathered already."""
        arrays = iter(view)
        return self._map(lambda x, entries: next(arrays) if entries else of_slots(x, slots), stored)

    def write_row(self, stored: Caches, row: Caches, table: Int[Array, " N"], slot: Any) -> Caches:
        """Stores a row in its slot and in the blocks of `table`."""

        def write(x: Array, new: Array, entries: Entries | None) -> Array:
            if entries is None:
                return jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis=0)
            # [1, N E, ...] or [1, K, N E, ...] -> [N, E, ...] or [N, K, E, ...]
            axis = entries.axis
            blocks = new.reshape(*new.shape[1:axis], len(table), *x.shape[axis:])
            return x.at[table].set(jnp.moveaxis(blocks, axis - 1, 0), mode="drop")

        return self._map(write, stored, row)

    def write_tokens(
        self,
        stored: Caches,
        rows: Caches,
        tables: Int[Array, "R N"],
        slots: Int[Array, " R"] | None,
        start: Int[Array, " R"],
        count: int,
    ) -> Caches:
        """Stores `count` tokens of rows from `start` on."""
        index = start[:, None] + jnp.arange(count)[None]  # [R, M]
        row = jnp.arange(len(start))[:, None]
        block = tables.at[row, index // self.block].get(mode="fill", fill_value=NOWHERE)

        def write(x: Array, new: Array, entries: Entries | None) -> Array:
            if entries is None:
                return with_slots(x, slots, new)
            entry, heads = index // entries.tokens, [slice(None)] * (entries.axis - 1)
            values = new.at[(row, *heads, entry)].get(mode="clip")  # [R, M, ...]
            return x.at[(block, *heads, entry % x.shape[entries.axis])].set(values, mode="drop")

        return self._map(write, stored, rows)

    def _map(self, f: Callable[..., Array], caches: Caches, *others: Caches) -> Caches:
        """Maps arrays, each with its `Entries`."""
        arrays = [jax.tree.leaves(each) for each in (caches, *others)]
        return jax.tree.unflatten(
            jax.tree.structure(caches), [f(*each) for each in zip(*arrays, self.entries, strict=True)]
        )


def of_slots(x: Array, slots: Int[Array, " R"] | None) -> Array:
    """Returns the rows of slots; all of them without `slots`."""
    return x if slots is None else x.at[slots].get(mode="clip")


def with_slots(x: Array, slots: Int[Array, " R"] | None, rows: Array) -> Array:
    """Returns the rows of all slots, those of `slots` replaced; slots that do not exist are dropped."""
    return rows if slots is None else x.at[slots].set(rows, mode="drop")


def most_tokens(model: Any) -> int:
    """Returns a capacity at which windows are rings, and no more than the model has learned positions."""
    learned = isinstance(getattr(model, "positions", None), nn.LearnedPositions)
    return model.max_length if learned else 1 << 21


def _belong_to(caches: Caches, kind: type) -> list[bool]:
    """Returns for each array whether it belongs to a cache of a kind."""
    nodes = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, kind))
    return [isinstance(node, kind) for node in nodes for _ in jax.tree.leaves(node)]


@functools.partial(jax.jit, static_argnames=("paging", "num_blocks"))
def with_blocks(stored: Caches, *, paging: Paging, num_blocks: int) -> Caches:
    """Returns the storage with more blocks."""

    def pad(x: Array, entries: Entries | None) -> Array:
        return jnp.pad(x, [(0, num_blocks - len(x)), *[(0, 0)] * (x.ndim - 1)]) if entries else x

    return paging._map(pad, stored)


@functools.partial(jax.jit, static_argnames="paging")
def read_row(stored: Caches, table: Int[Array, " N"], slot: Any, length: Any, *, paging: Paging) -> Caches:
    """Returns the first `length` tokens of a row as caches of one row."""
    row = paging.read(stored, table[None], jnp.asarray(slot)[None])
    return row.with_length(jnp.full(1, length, jnp.int32))


@functools.partial(jax.jit, static_argnames="paging")
def gather_view(stored: Caches, tables: Int[Array, "R N"], *, paging: Paging) -> list[Array]:
    """Returns the view of rows."""
    return paging.view(paging.read(stored, tables, None))


def tables_of(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Returns the blocks of each row as a table of `length`."""
    tables = np.full((len(rows), length), NOWHERE, np.int32)
    for table, blocks in zip(tables, rows, strict=True):
        table[: len(blocks)] = blocks[:length]
    return tables
