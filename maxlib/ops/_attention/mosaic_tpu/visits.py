"""The tiles that are visited, one after the other in a table: a kernel's grid is as long as the table is filled.

One number per tile says where it lies and what is to be done there. It is known before the kernel runs (scalar
prefetch), so that the next tile's blocks are on their way while this one is computed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_FIRST, _LAST, _FULL, _SEEN, _FLAGS = 1, 2, 4, 8, 4


class Tile(NamedTuple):
    """Where it lies, in blocks, and what is to be done.

    first, last: a row's result begins, is finished. full, masked: all of it is seen, some of it; if neither, there is
    nothing to compute.
    """

    batch: Any
    row: Any
    column: Any
    first: Any
    last: Any
    full: Any
    masked: Any


@dataclasses.dataclass(frozen=True)
class Table:
    """How the numbers are made and read."""

    row_bits: int
    column_bits: int

    def place(self, batch, row, column):
        return ((batch << self.row_bits | row) << self.column_bits | column) << _FLAGS

    def read(self, code) -> Tile:
        column, row = code >> _FLAGS, code >> (_FLAGS + self.column_bits)
        return Tile(
            batch=row >> self.row_bits,
            row=row & (2**self.row_bits - 1),
            column=column & (2**self.column_bits - 1),
            first=code & _FIRST != 0,
            last=code & _LAST != 0,
            full=code & (_FULL | _SEEN) == _FULL | _SEEN,
            masked=code & (_FULL | _SEEN) == _SEEN,
        )


def table(
    visited: Bool[Array, "P B R C"], full: Bool[Array, "P B R C"]
) -> tuple[Table, Int[Array, "P tiles"], Int[Array, ""]]:
    """For each of P parts of the work its tiles, row after row: how to read the numbers, the numbers, and how many the
    longest part has.

    A row without tiles gets one where nothing is seen, so that its result is written. A shorter part ends with numbers
    that ask for nothing.
    """
    _, B, R, C = visited.shape
    how = Table((R - 1).bit_length(), (C - 1).bit_length())
    batch, row, column = (jnp.arange(n, dtype=jnp.int32) for n in (B, R, C))
    place = how.place(batch[:, None, None], row[None, :, None], column[None, None])[None]
    listed = visited | (~visited.any(axis=-1, keepdims=True) & (column == 0)[None, None, None])
    count = jnp.cumsum(listed, axis=-1)
    first, last = count == 1, count == count[..., -1:]
    code = place | _FIRST * first | _LAST * last | _FULL * full | _SEEN * visited
    codes = jnp.sort(jnp.where(listed, code, jnp.iinfo(jnp.int32).max).reshape(len(code), -1), axis=-1)
    lengths = listed.sum(axis=(1, 2, 3), dtype=jnp.int32)
    behind = jnp.arange(codes.shape[1], dtype=jnp.int32)[None] >= lengths[:, None]
    end = jnp.max(jnp.where(behind, 0, codes), axis=-1, keepdims=True) >> _FLAGS << _FLAGS
    return how, jnp.where(behind, end, codes), jnp.max(lengths)


def shares(visited: Bool[Array, "B R C"], parts: int) -> Bool[Array, "P B R C"]:
    """Each row's visited tiles cut into `parts` runs of about the same length."""
    count = jnp.cumsum(visited, axis=-1)
    share = (count - 1) * parts // jnp.maximum(count[..., -1:], 1)
    return visited[None] & (share[None] == jnp.arange(parts)[:, None, None, None])
