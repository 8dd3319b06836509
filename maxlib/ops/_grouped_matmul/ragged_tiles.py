"""Tile sizes of JAX's and tokamax's grouped matmuls on NVIDIA GPUs. None has been timed by maxlib yet."""

import dataclasses
from typing import ClassVar

from maxlib.kernels.tile_sizes import TileSizes

SHARED = 232_448  # bytes of shared memory that a block of threads may have on Hopper and Blackwell
WIDTH = 64  # widths are multiples of it: the numbers that one step sums


@dataclasses.dataclass(frozen=True)
class RaggedTile(TileSizes):
    """A tile of the kernels for Hopper, which one warpgroup computes.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        summed: Numbers that are summed in one step.
        stages: Steps whose operands are in shared memory at once.
    """

    rows: int = 128
    columns: int = 128
    summed: int = 64
    stages: int = 4

    def __post_init__(self):
        self.require(64, "rows", "columns", "summed")
        self.require(1, "stages", least=2)  # one step is loaded while another one is multiplied
        if self.rows > 128 or self.rows * self.columns > 128 * 192:
            raise ValueError(f"RaggedTile: must be at most 128 x 192, a warpgroup's registers, got {self}")
        if (needed := self.shared()) > SHARED:
            raise ValueError(f"RaggedTile: must fit in {SHARED:,} bytes of shared memory, {self} takes {needed:,}")

    def shared(self) -> int:
        """Returns the bytes of shared memory: the operands of all stages and the result, two bytes a number."""
        return 2 * (self.stages * self.summed * (self.rows + self.columns) + self.rows * self.columns)


@dataclasses.dataclass(frozen=True)
class TritonTile(TileSizes):
    """A tile of tokamax's kernels in Triton.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        summed: Numbers that are summed in one step.
        warps: Warps that compute the tile.
        stages: Steps whose operands are in shared memory at once.
    """

    rows: int = 128
    columns: int = 256
    summed: int = 32
    warps: int = 8
    stages: int = 4

    def __post_init__(self):
        self.require(16, "rows", "columns", "summed")
        self.require(1, "warps", "stages")
        self.require_powers_of_two("rows", "columns", "summed", "warps")


@dataclasses.dataclass(frozen=True)
class RaggedHopperTiles(TileSizes):
    """Tiles of JAX's and tokamax's grouped matmuls on Hopper.

    Args:
        forward: Tiles of the forward pass.
        d_rows: Tiles of the gradient of the rows.
        d_weights: Tiles of tokamax's gradient of the weights, in Triton; None for `tiled`, in XLA.
    """

    forward: RaggedTile
    d_rows: RaggedTile
    d_weights: TritonTile | None = None

    kernel: ClassVar[str] = "grouped_matmul/jax_mosaic_gpu/hopper"


@dataclasses.dataclass(frozen=True)
class TritonTiles(TileSizes):
    """Tiles of tokamax's grouped matmuls in Triton, one for each pass.

    The defaults are among the fastest of tokamax's measurements on an A100, of those whose registers do not spill.
    """

    forward: TritonTile = TritonTile(rows=64, warps=4)
    d_rows: TritonTile = TritonTile(rows=64, warps=4)
    d_weights: TritonTile = TritonTile()

    kernel: ClassVar[str] = "grouped_matmul/tokamax"


@dataclasses.dataclass(frozen=True)
class RaggedBlackwellTiles(TileSizes):
    """Tiles of JAX's and tokamax's grouped matmuls on Blackwell; JAX's are 256 x 256, the only ones it has.

    Args:
        stages: Steps of 64 summed numbers whose operands are in shared memory at once.
        band: Tiles of rows that are computed before the next column of tiles.
        d_weights: Tiles of tokamax's gradient of the weights, in Triton; None for `tiled`, in XLA.
    """

    stages: int = 6
    band: int = 8
    d_weights: TritonTile | None = None

    kernel: ClassVar[str] = "grouped_matmul/jax_mosaic_gpu/blackwell"

    def __post_init__(self):
        self.require(1, "stages", least=2)
        self.require(1, "band")
        if self.stages > 6:
            raise ValueError(f"RaggedBlackwellTiles: stages must be at most 6, what fits, got {self.stages}")


RaggedTiles = RaggedHopperTiles | RaggedBlackwellTiles


def hopper_tiles(M: int, E: int, with_triton: bool = False) -> RaggedHopperTiles:
    """Chooses tiles for M rows of E experts, by what is installed."""
    # An expert's first and last tile are not full, so that few rows waste less in small tiles.
    tile = RaggedTile(rows=128 if M >= 128 * E else 64)
    # The fastest of tokamax's measurements on an H100, for 14 of 26 shapes.
    return RaggedHopperTiles(tile, tile, TritonTile(stages=5) if with_triton else None)
