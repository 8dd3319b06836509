"""Tile sizes of tokamax's attention in Triton. Chosen by what the compiler fits into registers, not timed yet."""

import dataclasses
import re
from typing import ClassVar

from maxlib.hardware import is_blackwell, is_hopper
from maxlib.kernels.tile_sizes import TileSizes

WIDEST = 256  # of the widths of heads whose kernels fit into registers and shared memory in both passes


@dataclasses.dataclass(frozen=True)
class TritonAttentionTile(TileSizes):
    """A tile of one pass: a block of threads keeps one side and passes over the other.

    Args:
      stays: queries of a block forward; backward, keys for their gradient, and queries for theirs.
      streams: keys of a step forward; backward, queries of a step, and keys.
      warps: warps of a block.
      stages: steps whose operands are in shared memory at once.
    """

    stays: int = 64
    streams: int = 64
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        self.require(16, "stays", "streams")
        self.require(1, "warps", "stages")
        if odd := [x for x in (self.stays, self.streams, self.warps) if x & (x - 1)]:
            raise ValueError(f"TritonAttentionTile: stays, streams and warps must be powers of two, got {odd[0]}")


@dataclasses.dataclass(frozen=True)
class TritonAttentionTiles(TileSizes):
    """Tiles of tokamax's attention in Triton, one for each pass.

    Args:
      forward: tile of the forward pass.
      backward: tile of the backward pass. Near a causal mask's diagonal a step is half as long, and at least 16.
    """

    forward: TritonAttentionTile = TritonAttentionTile(128, 64, 8)
    backward: TritonAttentionTile = TritonAttentionTile(64, 32, 8)

    kernel: ClassVar[str] = "attention/tokamax_triton"

    def __post_init__(self):
        self.backward.require(32, "streams")


def triton_tiles(key_dim: int, value_dim: int, device_kind: str) -> TritonAttentionTiles:
    """Chooses tiles by the width of heads, which the kernels pad to a power of two, and the device's shared memory."""
    width = max(key_dim, value_dim)
    if width <= 64:
        return TritonAttentionTiles(TritonAttentionTile(128, 64, 8, 3), TritonAttentionTile(128, 32, 8))
    if width <= 128:
        return TritonAttentionTiles()
    forward = TritonAttentionTile(64, 64 if _has_large_shared_memory(device_kind) else 32, 8)
    return TritonAttentionTiles(forward, TritonAttentionTile(32, 32, 8))


def _has_large_shared_memory(device_kind: str) -> bool:
    """Returns True for the GPUs of data centers with 163 KiB and more per block of threads; others have 99."""
    return (
        is_hopper(device_kind) or is_blackwell(device_kind) or re.search(r"\bA(30|100|800)\b", device_kind) is not None
    )
