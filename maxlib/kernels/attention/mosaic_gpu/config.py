"""Tile sizes by head width, chosen so that a kernel fits into a streaming multiprocessor of Hopper.

The sizes are the largest that compile without spilled registers.
"""

import dataclasses
from typing import ClassVar

import jax

from maxlib.kernels.tile_sizes import TileSizes

ROWS = 64  # rows of a tile per warpgroup: the M dimension of one wgmma instruction
WIDEST = 256  # largest head width


def processors() -> int:
    """Returns the number of streaming multiprocessors of this GPU (an H20 has 78); without a GPU, an H100's 132."""
    device, *_ = jax.devices()
    return device.core_count if device.platform == "gpu" else 132


@dataclasses.dataclass(frozen=True)
class Tiles(TileSizes):
    """Sizes of a tile: `warpgroups` times 64 rows stay in shared memory, `columns` stream through `stages` buffers."""

    warpgroups: int
    columns: int
    stages: int = 2

    def __post_init__(self):
        self.require(1, "warpgroups")
        self.require(16, "columns")
        self.require(1, "stages", least=2)  # one buffer is filled while another one is read
        if self.warpgroups > 3:
            raise ValueError(f"Tiles: warpgroups must be at most 3, whose registers fit, got {self.warpgroups}")

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Returns the registers per thread of a compute warpgroup and of the memory warpgroup.

        A warpgroup has 128 threads; all of them together fit into the register file of 64k.
        """
        return {1: (240, 40), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


def forward_tiles(key_dim: int, value_dim: int) -> Tiles:
    """Chooses tiles of the forward kernel: queries stay, keys and values stream."""
    if max(key_dim, value_dim) <= 64:
        return Tiles(warpgroups=3, columns=128)
    return Tiles(warpgroups=2, columns=128 if key_dim + value_dim <= 320 else 64)


def decodes(num_queries: int, num_groups: int) -> bool:
    """Tells whether all queries of a key head fit into one warpgroup's tile."""
    return num_queries * num_groups <= ROWS


def decode_tiles(key_dim: int, value_dim: int) -> Tiles:
    """Chooses tiles for decoding: memory limits the speed, so as many blocks of keys are in flight as fit."""
    columns = 128 if key_dim + value_dim <= 320 else 64
    room = 220 * 2**10 - 2 * ROWS * max(key_dim, value_dim)  # bytes of shared memory that keys and values may take
    return Tiles(warpgroups=1, columns=columns, stages=min(4, room // (2 * columns * (key_dim + value_dim))))


def decode_parts(num_blocks: int, num_keys: int) -> int:
    """Returns the number of parts that the blocks of keys are distributed over, so that all processors have work.

    In a full cache, each part has about 512 keys or more.
    """
    return max(1, min(4 * processors() // num_blocks, num_keys // 512))


def query_gradient_tiles(key_dim: int, value_dim: int, softcap: bool) -> Tiles:
    """Chooses tiles of the kernel for dq: queries and output gradients stay, keys and values stream."""
    wide = _is_wide(key_dim, value_dim, softcap)
    return Tiles(warpgroups=2 if key_dim + value_dim <= 384 else 1, columns=64 if wide else 128)


def key_gradient_tiles(key_dim: int, value_dim: int, softcap: bool) -> dict[tuple[str, ...], Tiles]:
    """Chooses the kernels for dk and dv, and their tiles: keys and values stay, queries and output gradients stream.

    If both gradients need too many registers, a block of queries is half as long, or two kernels compute one gradient
    each, which costs one more matmul.
    """
    if not _is_wide(key_dim, value_dim, softcap):
        return {("dk", "dv"): Tiles(warpgroups=2, columns=64)}
    if key_dim + value_dim <= 320:
        return {("dk", "dv"): Tiles(warpgroups=2, columns=32)}
    two = Tiles(warpgroups=2, columns=64)
    return {("dk",): two if key_dim + value_dim <= 384 else Tiles(warpgroups=1, columns=64), ("dv",): two}


def key_gradient_parts(num_blocks: int, num_groups: int) -> int:
    """Returns the number of parts to cut the query heads of a key head into, a divisor of `num_groups`.

    With one part, a block of threads sums over all heads, and `num_blocks` blocks of keys may leave processors idle.
    Returns the smallest number that gives every processor four blocks, because blocks differ in length under a causal
    mask.
    """
    divisors = [parts for parts in range(1, num_groups + 1) if num_groups % parts == 0]
    return next((parts for parts in divisors if parts * num_blocks >= 4 * processors()), num_groups)


def _is_wide(key_dim: int, value_dim: int, softcap: bool) -> bool:
    """Tells whether the gradients fill the registers; a soft-cap needs some of them for its derivative."""
    return key_dim + value_dim > (192 if softcap else 256)


@dataclasses.dataclass(frozen=True)
class HopperAttentionTiles(TileSizes):
    """Tiles of maxlib's attention on Hopper.

    Args:
        forward: Queries stay, keys and values stream.
        decode: Few queries stay, keys and values stream.
        dq: Queries and output gradients stay, keys and values stream.
        dk: Keys and values stay, queries and output gradients stream.
        dv: The same; None if the kernel for dk makes dv too, which saves a matmul and takes more registers.
    """

    forward: Tiles
    decode: Tiles
    dq: Tiles
    dk: Tiles
    dv: Tiles | None = None

    kernel: ClassVar[str] = "attention/mosaic_gpu"

    def __post_init__(self):
        if self.decode.warpgroups != 1:
            raise ValueError(f"HopperAttentionTiles: decode must have 1 warpgroup, got {self.decode.warpgroups}")
        # Queries and their statistics come to the gradients in whole blocks of 128.
        for name, size in [
            ("dq", self.dq.rows),
            *(("/".join(gradients), x.columns) for gradients, x in self.keys.items()),
        ]:
            if 128 % size:
                raise ValueError(
                    f"HopperAttentionTiles: {name} must take a divisor of 128 queries at a time, got {size}"
                )

    @property
    def keys(self) -> dict[tuple[str, ...], Tiles]:
        """Returns the kernels for the gradients of keys and values, and their tiles."""
        return {("dk", "dv"): self.dk} if self.dv is None else {("dk",): self.dk, ("dv",): self.dv}


def attention_tiles(key_dim: int, value_dim: int, softcap: bool) -> HopperAttentionTiles:
    """Chooses tiles of all kernels by the widths of the heads, the largest that do not spill."""
    sizes = key_dim, value_dim, softcap
    dk, *dv = key_gradient_tiles(*sizes).values()
    forward, decode = forward_tiles(key_dim, value_dim), decode_tiles(key_dim, value_dim)
    return HopperAttentionTiles(forward, decode, query_gradient_tiles(*sizes), dk, *dv)


@dataclasses.dataclass(frozen=True)
class HopperLatentTiles(TileSizes):
    """Sizes of the kernel for latents: `columns` of them stream through `stages` buffers past 64 rows of queries."""

    columns: int = 64
    stages: int = 2

    kernel: ClassVar[str] = "attention/mosaic_gpu_mla"

    def __post_init__(self):
        self.require(16, "columns")
        self.require(1, "stages", least=2)

    @property
    def registers(self) -> tuple[int, int]:
        """Returns the registers per thread of the two compute warpgroups and of the memory warpgroup."""
        return Tiles(2, self.columns).registers


def latent_tiles(key_dim: int) -> HopperLatentTiles:
    """Chooses tiles of the kernel for latents: as many blocks in flight as fit beside the queries."""
    block = 2 * ROWS * key_dim  # bytes of 64 queries, and of 64 latents
    return HopperLatentTiles(64, min(4, 220 * 2**10 // block - 1))


def latents_refuse(key_dim: int, value_dim: int) -> str | None:
    """Returns the reason why the kernel for latents cannot take heads of these widths, or None."""
    if value_dim % 128 or not 128 <= value_dim <= 512:
        return f"takes values whose width is 128, 256, 384 or 512, not Hv={value_dim}"
    if (rest := key_dim - value_dim) % 16 or not 16 <= rest <= 64:
        return f"takes keys that are 16, 32, 48 or 64 channels wider than values, not Hk={key_dim} and Hv={value_dim}"
    return None


def latent_parts(num_blocks: int, num_keys: int) -> int:
    """Returns the number of parts that a row's keys are distributed over, for the shortest time of a full cache.

    Each processor has one block of threads at a time, which first costs as much as some 256 keys.
    """

    def cost(parts: int) -> float:
        rounds = -(-num_blocks * parts // processors())
        return rounds * (num_keys / parts + 256)

    return min(range(1, max(num_keys // 512, 1) + 1), key=cost)
