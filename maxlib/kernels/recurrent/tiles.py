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
        unit: Value heads that a program computes side by side, in a loop over all of them.
        splits: Programs that share a key head.
        programs: Programs of a row.
    """

    key_heads: int
    heads: int
    unit: int
    splits: int
    programs: int

    @classmethod
    def of(cls, key_heads: int, heads: int, value_dim: int, columns: int) -> "Shares | None":
        """Shares the heads of a call among programs of at most so many columns; None if a unit fills no register."""
        group = heads // key_heads
        units = [unit for unit in _divisors(group) if unit * value_dim % LANES == 0]
        if not units:
            return None
        # Two registers wide, if possible: while one head waits for its matmuls, another one computes.
        unit = next((unit for unit in units if unit * value_dim >= 2 * LANES), units[-1])
        most = max(columns // (unit * value_dim), 1)  # units of a program
        of_key = max(count for count in _divisors(group // unit) if count <= most)
        keys = max(count for count in _divisors(key_heads) if count <= most // of_key) if of_key * unit == group else 1
        return cls(keys, of_key * unit, unit, group // (of_key * unit), heads // (keys * of_key * unit))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
