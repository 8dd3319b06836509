"""Tile sizes of the kernels, a frozen dataclass for each: what `ops.tile_sizes` takes and explanations show."""

from maxlib.kernels.attention.mosaic_gpu.config import HopperAttentionTiles, HopperLatentTiles
from maxlib.kernels.grouped_matmul.megablox_tiles import MegabloxTiles
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import HopperGroupedTiles
from maxlib.kernels.recurrent.tiles import MosaicTpuTiles
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.chunked import ChunkedTiles
from maxlib.ops._attention.splash import SplashBlock as SplashBlock
from maxlib.ops._attention.splash import SplashTiles
from maxlib.ops._attention.splash import splash_tiles as splash_tiles
from maxlib.ops._attention.split_kv import SplitTiles
from maxlib.ops._attention.tokamax_triton import TritonAttentionTiles
from maxlib.ops._grouped_matmul.tiled import TiledTiles
from maxlib.ops._grouped_matmul.tokamax_triton import TritonTiles
from maxlib.ops._recurrent.gated_delta import DeltaTiles
from maxlib.ops._recurrent.kimi_delta import KimiTiles
from maxlib.ops._recurrent.ssd import SSDTiles

__all__ = [
    "ChunkedTiles",
    "DeltaTiles",
    "HopperAttentionTiles",
    "HopperGroupedTiles",
    "HopperLatentTiles",
    "KimiTiles",
    "MegabloxTiles",
    "MosaicTpuTiles",
    "SSDTiles",
    "SplashTiles",
    "SplitTiles",
    "TileSizes",
    "TiledTiles",
    "TritonAttentionTiles",
    "TritonTiles",
]
