"""Tile sizes by head width, and what fits into a streaming multiprocessor of Hopper.

The sizes are the largest that compile without spilled registers (docs/kernels.md has the table); none has been timed
yet.
"""

import dataclasses

ROWS = 64  # of a tile, per warpgroup: what one wgmma instruction takes
WIDEST = 256  # heads
PROCESSORS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`warpgroups` times 64 rows stay in shared memory, while blocks of `columns` stream past in `stages` buffers."""

    warpgroups: int
    columns: int
    stages: int = 2

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread of a compute and of the memory warpgroup; together they fit in a register file of 64k."""
        return {1: (240, 40), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


def forward_tiles(key_dim: int, value_dim: int) -> Tiles:
    """Queries stay, keys and values stream."""
    if max(key_dim, value_dim) <= 64:
        return Tiles(warpgroups=3, columns=128)
    return Tiles(warpgroups=2, columns=128 if key_dim + value_dim <= 320 else 64)


def decodes(num_queries: int, num_groups: int) -> bool:
    """Whether all queries of a key head fit into one warpgroup's tile."""
    return num_queries * num_groups <= ROWS


def decode_tiles(key_dim: int, value_dim: int) -> Tiles:
    """As many keys on their way as fit: these tiles wait for memory."""
    columns = 128 if key_dim + value_dim <= 320 else 64
    room = 220 * 2**10 - 2 * ROWS * max(key_dim, value_dim)  # bytes of shared memory that keys and values may take
    return Tiles(warpgroups=1, columns=columns, stages=min(4, room // (2 * columns * (key_dim + value_dim))))


def decode_parts(num_blocks: int, num_keys: int) -> int:
    """Into how many parts the keys are cut, so that all processors have work; at least 512 keys each, where the length
    divides.
    """
    wanted = max(1, min(4 * PROCESSORS // num_blocks, num_keys // 512))
    return max(parts for parts in range(1, wanted + 1) if num_keys % (8 * parts) == 0 or parts == 1)


def query_gradient_tiles(key_dim: int, value_dim: int, softcap: bool) -> Tiles:
    """Queries and output gradients stay, keys and values stream."""
    wide = _is_wide(key_dim, value_dim, softcap)
    return Tiles(warpgroups=2 if key_dim + value_dim <= 384 else 1, columns=64 if wide else 128)


def key_gradient_tiles(key_dim: int, value_dim: int, softcap: bool) -> dict[tuple[str, ...], Tiles]:
    """Keys and values stay, queries and output gradients stream: the kernels to run, and their tiles.

    Where both gradients are too many registers, two kernels make one each, for the price of one more matmul.
    """
    two = Tiles(warpgroups=2, columns=64)
    if not _is_wide(key_dim, value_dim, softcap):
        return {("dk", "dv"): two}
    return {("dk",): two if key_dim + value_dim <= 384 else Tiles(warpgroups=1, columns=64), ("dv",): two}


def _is_wide(key_dim: int, value_dim: int, softcap: bool) -> bool:
    """Whether gradients fill the registers; a soft-cap needs some of them for its derivative."""
    return key_dim + value_dim > (192 if softcap else 256)
