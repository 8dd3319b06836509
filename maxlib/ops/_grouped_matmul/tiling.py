"""Tile sizes of the grouped matmuls on TPUs, chosen by what each choice would compute and move."""

import dataclasses
import functools
import itertools
import math

LANES = 128  # of a vector register
VMEM = 15 * 2**20  # bytes; every TPU since v4 gives a kernel 16 MiB unless it is told otherwise
# A v5p's figures, rounded. Only their ratios matter, and v4, v5e and v6e have about the same.
FLOPS, BANDWIDTH, STEP = 4e14, 2.5e12, 3.5e-7  # a second, bytes a second, seconds of a grid step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One grouped matmul.

    `(M x K) @ (E x K x N)` where a row meets its expert's matrix, `(M x K)^T @ (M x N)` for each expert where matrices
    are the result.

    Args:
        rows: M.
        summed: K; of the transposed matmul the width of its left operand.
        out: N.
        experts: E.
        width: Bytes of an operand's element.
        out_width: Bytes of a result's element.
        transposed: Whether matrices are the result.
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
        """Returns the bytes of vector memory: two of each block, so that one is fetched meanwhile, and the sum."""
        m, k, n = self.rows, self.summed, self.out
        left, right, out = (m * k, m * n, k * n) if of.transposed else (m * k, k * n, m * n)
        masked = 4 * m * max(k, n) if of.transposed else 0
        return 2 * (of.width * (left + right) + of.out_width * out) + 4 * out + masked

    def moved(self, of: Sizes) -> int:
        """Returns the bytes that travel between the device's memory and its vector memory."""
        n, k = -(-of.out // self.out), -(-of.summed // self.summed)  # tiles along N and K
        rows, weights = self.visits(of) * self.rows, of.summed * of.out
        if of.transposed:
            return of.width * rows * (of.summed * n + of.out * k) + of.out_width * of.experts * weights
        # An expert's matrix stays while its rows pass, unless it is cut along K.
        matrices = of.experts if k == 1 else self.visits(of)
        return of.width * (rows * of.summed * n + matrices * weights) + of.out_width * of.rows * of.out

    def visits(self, of: Sizes) -> int:
        """Returns how many tiles along M are computed: both neighbours visit one inside which an expert's rows
        begin.
        """
        return -(-of.rows // self.rows) + of.experts - 1

    def seconds(self, of: Sizes) -> float:
        """Returns about how long the matmul takes where arithmetic and memory hardly overlap: of two choices that
        the one bounds alike, the other decides.
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
    """All of a dimension, or whole registers of it."""
    return [size] + [length for length in range(LANES, 4096, LANES) if length < size]
