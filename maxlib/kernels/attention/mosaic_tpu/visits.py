"""Table of the visited tiles, in order: a kernel's grid is as long as the filled part of the table.

One number per tile encodes its position and the work to do. It is known before the kernel runs (scalar prefetch), so
that the next tile's blocks are fetched while this one is computed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# The lowest 4 bits of a number are flags; above them are column, row and batch.
_FIRST, _LAST, _FULL, _SEEN, _FLAGS = 1, 2, 4, 8, 4


class Tile(NamedTuple):
    """Position of a tile, in blocks, and the work to do in it.

    Args:
      batch: batch row.
      row: row of tiles.
      column: column of tiles.
      first: the row's result begins here.
      last: the row's result is finished here.
      full: every pair in the tile is visible, so no mask is needed.
      masked: some pairs are visible. If neither full nor masked, there is nothing to compute.
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
    """Encoding of tiles as numbers: how many bits the row and the column take."""

    row_bits: int
    column_bits: int

    def place(self, batch, row, column):
        """Encodes a position, without flags. Numbers sort by batch, then row, then column."""
        return ((batch << self.row_bits | row) << self.column_bits | column) << _FLAGS

    def read(self, code) -> Tile:
        """Decodes a number."""
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
    """Lists the tiles of each of P parts of the work, row after row.

    A row without tiles gets one in which nothing is visible, so that its result is written. Shorter parts are padded
    with numbers that require no work.

    Args:
      visited: tiles to visit.
      full: tiles that need no mask.

    Returns:
      The encoding, the numbers, and the number of tiles in the longest part.
    """
    _, B, R, C = visited.shape
    how = Table((R - 1).bit_length(), (C - 1).bit_length())
    batch, row, column = (jnp.arange(n, dtype=jnp.int32) for n in (B, R, C))
    place = how.place(batch[:, None, None], row[None, :, None], column[None, None])[None]
    listed = visited | (~visited.any(axis=-1, keepdims=True) & (column == 0)[None, None, None])
    count = jnp.cumsum(listed, axis=-1)  # 1 at the first listed tile of a row, the total from the last one on
    first, last = count == 1, count == count[..., -1:]
    code = place | _FIRST * first | _LAST * last | _FULL * full | _SEEN * visited
    # [P, B, R, C] -> [P, B * R * C]: sorting moves tiles that are not listed to the end.
    codes = jnp.sort(jnp.where(listed, code, jnp.iinfo(jnp.int32).max).reshape(len(code), -1), axis=-1)
    lengths = listed.sum(axis=(1, 2, 3), dtype=jnp.int32)
    behind = jnp.arange(codes.shape[1], dtype=jnp.int32)[None] >= lengths[:, None]
    # Padding repeats the last tile without its flags: the same blocks stay loaded, and nothing is computed.
    end = jnp.max(jnp.where(behind, 0, codes), axis=-1, keepdims=True) >> _FLAGS << _FLAGS
    return how, jnp.where(behind, end, codes), jnp.max(lengths)


def shares(visited: Bool[Array, "B R C"], parts: int) -> Bool[Array, "P B R C"]:
    """Cuts the visited tiles of each row into `parts` runs of about the same length."""
    count = jnp.cumsum(visited, axis=-1)
    share = (count - 1) * parts // jnp.maximum(count[..., -1:], 1)
    return visited[None] & (share[None] == jnp.arange(parts)[:, None, None, None])
