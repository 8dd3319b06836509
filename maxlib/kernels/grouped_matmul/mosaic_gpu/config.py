"""Tile sizes of the grouped matmul, the largest that do not spill (docs/kernels.md); none has been timed yet."""

import dataclasses

WARPGROUPS, ROWS, SUMMED = 2, 64, 64  # compute warpgroups, rows of each, and numbers that are summed in one step
REGISTERS = 232, 40  # per thread of a compute and of the memory warpgroup


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of a tile: 128 rows times `columns` of the result, whose operands stream through `stages` buffers."""

    columns: int = 128
    stages: int = 4


def row_tiles(width: int, products: int) -> Tiles:
    """Chooses tiles of rows times matrices, `products` of them at once, with results `width` wide.

    Twice the columns need 3/4 of the bytes per product, from memory and from shared memory. Two products of 128 columns
    fill a thread's registers as one of 256 does.
    """
    wasted = -width % 256
    return Tiles(columns=256, stages=3) if products == 1 and wasted <= width // 8 else Tiles()
