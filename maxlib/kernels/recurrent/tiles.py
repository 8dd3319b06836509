"""How the kernels for TPUs cut a recurrence: tokens of a chunk, and the heads of a program."""

import dataclasses
from typing import ClassVar

from maxlib.kernels.tile_sizes import TileSizes

LANES = 128  # of a vector register


@dataclasses.dataclass(frozen=True)
class MosaicTpuTiles(TileSizes):
    """Tokens of a chunk, a power of two, and columns of the values that a program computes at once."""

    chunk: int = 128  # as wide as the matmul units of v5e and v5p
    columns: int = 1024

    kernel: ClassVar[str] = "recurrences/mosaic_tpu"

    def __post_init__(self):
        self.require(LANES)
        self.require_powers_of_two("chunk")


@dataclasses.dataclass(frozen=True)
class Shares:
    """The heads of a program.

    Args:
        key_heads: Key heads of a program.
        heads: Value heads of a program for each of its key heads.
        splits: Programs that share a key head.
        programs: Programs of a row.
    """

    key_heads: int
    heads: int
    splits: int
    programs: int

    @classmethod
    def of(cls, key_heads: int, heads: int, value_dim: int, columns: int) -> "Shares":
        """Shares the heads of a call among programs of at most so many columns, and at least one head."""
        group, most = heads // key_heads, max(1, columns // value_dim)
        of_key = _largest_divisor(group, most)
        keys = _largest_divisor(key_heads, most // group) if of_key == group else 1
        return cls(keys, of_key, group // of_key, heads // (keys * of_key))


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
