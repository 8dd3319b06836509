"""Tile sizes by head width, chosen so that a kernel fits into a streaming multiprocessor of Hopper.

The sizes are the largest that compile without spilled registers (docs/kernels.md has the table); none has been timed
yet.
"""

import dataclasses

import jax

ROWS = 64  # rows of a tile per warpgroup: the M dimension of one wgmma instruction
WIDEST = 256  # largest head width


def processors() -> int:
    """Returns the number of streaming multiprocessors of this machine's GPU (an H20 has 78); without one, an H100's 132."""
    device, *_ = jax.devices()
    return device.core_count if device.platform == "gpu" else 132


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of a tile: `warpgroups` times 64 rows stay in shared memory, `columns` stream through `stages` buffers."""

    warpgroups: int
    columns: int
    stages: int = 2

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

    If both gradients need too many registers, two kernels compute one each, which costs one more matmul.
    """
    two = Tiles(warpgroups=2, columns=64)
    if not _is_wide(key_dim, value_dim, softcap):
        return {("dk", "dv"): two}
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
