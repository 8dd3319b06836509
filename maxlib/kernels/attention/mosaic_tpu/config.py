"""Block sizes by generation of TPU. They compile within each generation's vector memory; none has been timed yet."""

import dataclasses
import math
from typing import ClassVar

from maxlib.kernels.tile_sizes import TileSizes

LANES = 128  # a vector register has 128 lanes and 8 sublanes
MOST_TILES = 2**17  # entries of the table of tiles, which then takes half of a core's scalar memory


@dataclasses.dataclass(frozen=True)
class Blocks(TileSizes):
    """Size of a tile: `rows` counts queries times the heads that share a key head, `keys` counts keys."""

    rows: int
    keys: int

    def __post_init__(self):
        self.require(16, "rows")
        self.require(LANES, "keys")


@dataclasses.dataclass(frozen=True)
class TPUAttentionTiles(TileSizes):
    """Tiles of maxlib's attention on TPUs.

    Args:
      forward: tile of the forward pass.
      backward: tile of both kernels of the backward pass.
      decode: keys that the kernel for few queries reads at a time, of all key heads.
    """

    forward: Blocks
    backward: Blocks
    decode: int

    kernel: ClassVar[str] = "attention/mosaic_tpu"

    def __post_init__(self):
        self.require(1, "decode")


@dataclasses.dataclass(frozen=True)
class Generation:
    """Properties of a TPU generation: block sizes, `vmem` bytes of vector memory for a kernel, and `cores` per device.

    Two cores of one device share a kernel's grid (megacore).
    """

    forward: Blocks
    backward: Blocks
    vmem: int
    cores: int = 1


_MIB = 2**20
V4 = Generation(Blocks(256, 512), Blocks(256, 512), vmem=15 * _MIB, cores=2)
V5E = Generation(Blocks(512, 1024), Blocks(512, 1024), vmem=96 * _MIB)
V5P = Generation(Blocks(1024, 1024), Blocks(512, 1024), vmem=48 * _MIB, cores=2)
V6E = Generation(Blocks(1024, 2048), Blocks(1024, 1024), vmem=96 * _MIB)
V7X = Generation(Blocks(1024, 1024), Blocks(512, 1024), vmem=48 * _MIB)

GENERATIONS = {
    "TPU v4": V4,
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "TPU7x": V7X,
}


def attention_tiles(chip: Generation, num_keys: int, num_kv_heads: int, width: int) -> TPUAttentionTiles:
    """Chooses tiles for a generation and the keys `S K H` of a call."""
    return TPUAttentionTiles(chip.forward, chip.backward, decode_keys(num_keys, num_kv_heads, width))


def generation(device_kind: str) -> Generation:
    """Returns the generation of a device by jax's name for it; the smallest one for an unknown device."""
    return GENERATIONS.get(device_kind, V4)


def queries(blocks: Blocks, groups: int, num_queries: int) -> int:
    """Returns the number of queries of each of `groups` heads in a tile, so that its rows fill whole registers."""
    # The smallest number of queries for which queries * groups is a multiple of `rows`.
    whole = lambda rows: rows // math.gcd(rows, groups)
    unit = whole(LANES) if groups * whole(LANES) <= 2 * blocks.rows else whole(16)
    fitting = max(blocks.rows // (groups * unit), 1) * unit
    return min(fitting, -(-num_queries // unit) * unit)


def keys(blocks: Blocks, num_keys: int) -> int:
    """Returns the number of keys in a tile: at most all keys, rounded up to whole registers."""
    return min(blocks.keys, -(-num_keys // LANES) * LANES)


def decodes(num_queries: int, num_heads: int) -> bool:
    """Tells whether the decode kernel is faster: reading the cache takes longer than computing with it."""
    return num_queries <= 16 and num_queries * num_heads <= 512


def decode_keys(num_keys: int, num_kv_heads: int, width: int) -> int:
    """Returns the number of keys to read at a time: about half a MiB in bfloat16, in whole registers, or all keys."""
    unit = LANES // math.gcd(LANES, num_kv_heads)
    fitting = max(2**18 // (width * num_kv_heads * unit), 1) * unit
    return min(fitting, num_keys)
