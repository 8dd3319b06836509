"""Tile sizes of the grouped matmuls on TPUs, chosen by an estimate of the arithmetic and the memory traffic."""

import dataclasses
import functools
import itertools
import math

LANES = 128  # lanes of a vector register
VMEM = 15 * 2**20  # bytes; every TPU since v4 gives a kernel 16 MiB by default
# A v5p's figures, rounded. Only their ratios matter, and v4, v5e and v6e have about the same.
FLOPS, BANDWIDTH, STEP = 4e14, 2.5e12, 3.5e-7  # a second, bytes a second, seconds of a grid step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one grouped matmul.

    It is `(M x K) @ (E x K x N)`, each row times its expert's matrix, or transposed `(M x K)^T @ (M x N)` per expert.

    Args:
        rows: M.
        summed: K; in the transposed matmul the width of the left operand.
        out: N.
        experts: E.
        width: Bytes of an operand's element.
        out_width: Bytes of a result's element.
        transposed: True if the result is a matrix per expert.
    """

    rows: int
    summed: int
    out: int
    experts: int
    width: int
    out_width: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The sizes of a tile along M, K and N."""

    rows: int
    summed: int
    out: int

    def vmem(self, of: Sizes) -> int:
        """Returns the bytes of vector memory: two buffers of each block, to overlap copies, and the accumulator."""
        m, k, n = self.rows, self.summed, self.out
        left, right, out = (m * k, m * n, k * n) if of.transposed else (m * k, k * n, m * n)
        masked = 4 * m * max(k, n) if of.transposed else 0
        return 2 * (of.width * (left + right) + of.out_width * out) + 4 * out + masked

    def moved(self, of: Sizes) -> int:
        """Returns the bytes moved between the device's main memory and its vector memory."""
        n, k = -(-of.out // self.out), -(-of.summed // self.summed)  # tiles along N and K
        rows, weights = self.visits(of) * self.rows, of.summed * of.out
        if of.transposed:
            return of.width * rows * (of.summed * n + of.out * k) + of.out_width * of.experts * weights
        # An expert's matrix stays in vector memory while its rows stream through, unless it is tiled along K.
        matrices = of.experts if k == 1 else self.visits(of)
        return of.width * (rows * of.summed * n + matrices * weights) + of.out_width * of.rows * of.out

    def visits(self, of: Sizes) -> int:
        """Returns the number of tiles computed along M; a tile with rows of two experts is computed twice."""
        return -(-of.rows // self.rows) + of.experts - 1

    def seconds(self, of: Sizes) -> float:
        """Estimates the time, as if arithmetic and memory traffic did not overlap.

        Unlike the maximum, the sum also ranks choices that are equal in the larger of the two.
        """
        steps = self.visits(of) * -(-of.summed // self.summed) * -(-of.out // self.out)
        computed = 2 * steps * self.rows * self.summed * self.out
        return computed / FLOPS + self.moved(of) / BANDWIDTH + steps * STEP


@functools.cache
def choose_tiles(of: Sizes) -> Tiles:
    """Chooses the tiles that fit in vector memory and take the least time."""
    rows = [m for m in (128, 256, 512) if m <= of.rows] or [-(-of.rows // 16) * 16]
    wide = itertools.product(rows, _lengths(of.summed), _lengths(of.out))
    fitting = [tiles for sizes in wide if (tiles := Tiles(*sizes)).vmem(of) <= VMEM]
    return min(fitting, key=lambda tiles: (tiles.seconds(of), -math.prod(dataclasses.astuple(tiles))))


def _lengths(size: int) -> list[int]:
    """Returns the candidate lengths of a tile along a dimension: the whole dimension, or multiples of a register."""
    return [size] + [length for length in range(LANES, 4096, LANES) if length < size]
