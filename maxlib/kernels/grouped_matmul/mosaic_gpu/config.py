"""Tile sizes of the grouped matmul, the largest whose registers do not spill."""

import dataclasses
from typing import ClassVar

from maxlib.kernels.tile_sizes import TileSizes

WARPGROUPS, ROWS, SUMMED = 2, 64, 64  # compute warpgroups, rows of each, and numbers that are summed in one step
REGISTERS = 232, 40  # per thread of a compute and of the memory warpgroup


@dataclasses.dataclass(frozen=True)
class Tiles(TileSizes):
    """Sizes of a tile: 128 rows times `columns` of the result, whose operands stream through `stages` buffers."""

    columns: int = 128
    stages: int = 4

    def __post_init__(self):
        self.require(64, "columns")  # a copy out of shared memory is 64 columns wide
        self.require(1, "stages", least=2)  # one buffer is filled while another one is read
        if self.columns > 256:
            raise ValueError(f"Tiles: columns must be at most 256, what one instruction computes, got {self.columns}")


@dataclasses.dataclass(frozen=True)
class HopperGroupedTiles(TileSizes):
    """Tiles of maxlib's grouped matmul on Hopper.

    Args:
        forward: Tiles of the forward pass.
        d_rows: Tiles of the gradient of the rows.
        d_weights: Tiles of the gradient of the weights, 128 outputs times `columns` inputs of a matrix.
        glu: Tiles of gate and up together, of each `columns` columns.
    """

    forward: Tiles
    d_rows: Tiles
    d_weights: Tiles = Tiles()
    glu: Tiles = Tiles()

    kernel: ClassVar[str] = "grouped_matmul/mosaic_gpu"

    def __post_init__(self):
        if self.glu.columns > 128:
            raise ValueError(
                f"HopperGroupedTiles: glu must have at most 128 columns of each product, got {self.glu.columns}"
            )


def grouped_tiles(inputs: int, outputs: int) -> HopperGroupedTiles:
    """Chooses tiles for matrices with so many inputs and outputs."""
    return HopperGroupedTiles(row_tiles(outputs, 1), row_tiles(inputs, 1), glu=row_tiles(outputs, 2))


def row_tiles(width: int, products: int) -> Tiles:
    """Chooses tiles of rows times matrices, `products` of them at once, with results `width` wide.

    Twice the columns need 3/4 of the bytes per product, from memory and from shared memory. Two products of 128 columns
    fill a thread's registers as one of 256 does.
    """
    wasted = -width % 256
    return Tiles(columns=256, stages=3) if products == 1 and wasted <= width // 8 else Tiles()
