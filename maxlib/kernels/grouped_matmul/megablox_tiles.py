"""Tile sizes of the grouped matmuls on TPUs, chosen by an estimate of the arithmetic and the memory traffic."""

import dataclasses
import functools
import itertools
import math
from typing import ClassVar

from maxlib.kernels.tile_sizes import TileSizes
from maxlib.kernels.vector_memory import DEFAULT_VMEM, MIB

LANES = 128  # lanes of a vector register
# Shares of a kernel's vector memory that the blocks of chosen tiles take; the compiler holds other values beside them.
_BLOCKS, _ASKED_BLOCKS = 15 / 16, 3 / 4
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
        vmem: Bytes of vector memory that the kernel gets, as `vmem_of` returns them.
    """

    rows: int
    summed: int
    out: int
    experts: int
    width: int
    out_width: int
    transposed: bool
    vmem: int = DEFAULT_VMEM


@dataclasses.dataclass(frozen=True)
class Tiles(TileSizes):
    """The sizes of a tile along M, K and N; K and N may be shorter than the tile."""

    rows: int
    summed: int
    out: int

    def __post_init__(self):
        self.require(1)
        self.require(16, "rows")

    def fit(self, of: Sizes) -> "Tiles":
        """Shrinks the tile to the matmul.

        Raises:
            ValueError: When what is left is no whole register, or does not fit into vector memory.
        """
        # Rows are padded to whole tiles; K and N are not, so a tile never reaches beyond them.
        tiles = Tiles(self.rows, min(self.summed, of.summed), min(self.out, of.out))
        for name, size in (("summed", of.summed), ("out", of.out)):
            if (tile := getattr(tiles, name)) < size and tile % LANES:
                raise ValueError(f"MegabloxTiles: {name} must be a multiple of {LANES}, or all {size}, got {tile}")
        if (needed := tiles.vmem(of)) > of.vmem:
            raise ValueError(f"MegabloxTiles: tiles must fit in {of.vmem:,} bytes, {tiles} of {of} takes {needed:,}")
        return tiles

    def vmem(self, of: Sizes) -> int:
        """Returns the bytes of vector memory: two buffers of each block, to overlap copies, and the accumulator."""
        m, k, n = self.rows, self.summed, self.out
        left, right, out = (m * k, m * n, k * n) if of.transposed else (m * k, k * n, m * n)
        masked = 4 * m * max(k, n) if of.transposed else 0
        return 2 * (of.width * (left + right) + of.out_width * out) + 4 * out + masked

    def asked(self, of: Sizes) -> int | None:
        """Returns the bytes that the kernel has to ask for; None if what it gets without asking will do.

        The compiler may hold a copy of the left block, pads lanes, and needs some itself: up to 13.4 MiB beyond `vmem`
        in kernels that libtpu compiled for v6e.
        """
        needed = self.vmem(of)
        spare = needed // 16 + of.width * self.rows * self.summed + MIB
        return None if needed <= DEFAULT_VMEM else needed + spare

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

    def computed(self, of: Sizes) -> int:
        """Returns the FLOPs of all tiles, with those that are computed twice and those that reach beyond K and N."""
        return 2 * self._steps(of) * self.rows * self.summed * self.out

    def _steps(self, of: Sizes) -> int:
        return self.visits(of) * -(-of.summed // self.summed) * -(-of.out // self.out)

    def seconds(self, of: Sizes) -> float:
        """Estimates the time, as if arithmetic and memory traffic did not overlap.

        Unlike the maximum, the sum also ranks choices that are equal in the larger of the two.
        """
        steps, computed = self._steps(of), self.computed(of)
        return computed / FLOPS + self.moved(of) / BANDWIDTH + steps * STEP


@functools.cache
def choose_tiles(of: Sizes) -> Tiles:
    """Chooses the tiles that fit in vector memory and take the least time."""
    rows = [m for m in (128, 256, 512) if m <= of.rows] or [-(-of.rows // 16) * 16]
    wide = itertools.product(rows, _lengths(of.summed), _lengths(of.out))
    most = of.vmem * (_ASKED_BLOCKS if of.vmem > DEFAULT_VMEM else _BLOCKS)
    fitting = [tiles for sizes in wide if (tiles := Tiles(*sizes)).vmem(of) <= most]
    return min(fitting, key=lambda tiles: (tiles.seconds(of), -math.prod(dataclasses.astuple(tiles))))


def _lengths(size: int) -> list[int]:
    """Returns the candidate lengths of a tile along a dimension: the whole dimension, or multiples of a register."""
    return [size] + [length for length in range(LANES, 4096, LANES) if length < size]


@dataclasses.dataclass(frozen=True)
class MegabloxTiles(TileSizes):
    """Tiles of JAX's grouped matmuls: of the forward pass, and of the gradients of rows and of weights."""

    forward: Tiles
    d_rows: Tiles
    d_weights: Tiles

    kernel: ClassVar[str] = "grouped_matmul/megablox"

    def fit(self, of: "Matmuls") -> "MegabloxTiles":
        """Shrinks the tiles to a call's matmuls, as `Tiles.fit` does."""
        return MegabloxTiles(
            *(getattr(self, field.name).fit(getattr(of, field.name)) for field in dataclasses.fields(self))
        )


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """The three matmuls of a call and of its gradients."""

    forward: Sizes
    d_rows: Sizes
    d_weights: Sizes

    @classmethod
    def of(
        cls,
        rows: int,
        weights: tuple[int, int, int],
        weight_order: str,
        width: int,
        weight_width: int,
        vmem: int = DEFAULT_VMEM,
    ) -> "Matmuls":
        """Returns the matmuls of so many rows with weights of this shape; widths are bytes of an element."""
        E, O, I = (weights[weight_order.index(axis)] for axis in "EOI")
        # The gradient of the weights has their order: the left operand's width comes first.
        left, right = (O, I) if weight_order == "EOI" else (I, O)
        # y = x w^T sums over I, dx = dy w over O, and dw = dy^T x over the rows.
        return cls(
            Sizes(rows, I, O, E, width, width, transposed=False, vmem=vmem),
            Sizes(rows, O, I, E, width, width, transposed=False, vmem=vmem),
            Sizes(rows, left, right, E, width, weight_width, transposed=True, vmem=vmem),
        )

    def tiles(self) -> MegabloxTiles:
        """Chooses tiles for each."""
        return MegabloxTiles(*map(choose_tiles, (self.forward, self.d_rows, self.d_weights)))
