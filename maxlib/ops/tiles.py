"""Tile sizes of the kernels, a frozen dataclass for each: what `ops.tile_sizes` takes and explanations show."""

from maxlib.kernels.attention.mosaic_gpu.config import HopperAttentionTiles, HopperLatentTiles
from maxlib.kernels.attention.mosaic_tpu.config import TPUAttentionTiles
from maxlib.kernels.gated_delta.api import DeltaTPUTiles
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import HopperGroupedTiles
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.chunked import ChunkedTiles
from maxlib.ops._attention.splash import SplashTiles
from maxlib.ops._attention.split_kv import SplitTiles
from maxlib.ops._attention.triton_tiles import TritonAttentionTiles
from maxlib.ops._gated_delta.chunked import DeltaTiles
from maxlib.ops._grouped_matmul.ragged_tiles import RaggedBlackwellTiles, RaggedHopperTiles, TritonTiles
from maxlib.ops._grouped_matmul.tiled import TiledTiles
from maxlib.ops._grouped_matmul.tiling import MegabloxTiles
from maxlib.ops._kda.chunked import KimiTiles
from maxlib.ops._ssd.chunked import SSDTiles

__all__ = [
    "ChunkedTiles",
    "DeltaTPUTiles",
    "DeltaTiles",
    "HopperAttentionTiles",
    "HopperGroupedTiles",
    "HopperLatentTiles",
    "KimiTiles",
    "MegabloxTiles",
    "RaggedBlackwellTiles",
    "RaggedHopperTiles",
    "SSDTiles",
    "SplashTiles",
    "SplitTiles",
    "TPUAttentionTiles",
    "TileSizes",
    "TiledTiles",
    "TritonAttentionTiles",
    "TritonTiles",
]
