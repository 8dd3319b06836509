"""Counts what JAX's grouped matmul kernels for TPUs (megablox) compute and move.

Their own estimate counts an expert's matrix once for every tile of rows, although it stays on the chip meanwhile, and
the whole buffer of rows, although they visit only tiles with rows of an expert.
"""

import dataclasses
import math
import re

from maxlib.kernels.grouped_matmul.megablox_tiles import Sizes, Tiles, choose_tiles
from maxlib.kernels.vector_memory import DEFAULT_VMEM
from maxlib.plan._hlo_text import Instruction, shapes_of, size_of

# The kernel by its operands: the number of tiles, each expert's first row, each tile's expert and its place, the first
# expert, rows, and matrices or, in the transposed matmul, rows again. jax 0.11 loses the name of what it traced once.
_NUMBERS = r"s32\[\], (?:s32\[\d+\]\{0\}, ){3}s32\[1\]\{0\}, "
_KERNEL = re.compile(
    rf'operand_layout_constraints=\{{({_NUMBERS}\w+\[\d+,\d+\]\S+ \w+\[\d+,\d+(,\d+)?\]\{{[\d,]+\}})\}}, .*pallas_call"'
)


def grouped_flops(one: Instruction, room: float = 1) -> float | None:
    """Returns the FLOPs of a grouped matmul, None for any other instruction.

    Args:
      one: the instruction.
      room: size of the buffer of rows, as a multiple of the rows that arrive.
    """
    of = _sizes(one, room)
    return None if of is None else 2.0 * of.rows * of.summed * of.out


def repeated_flops(one: Instruction, room: float = 1, vmem: int = DEFAULT_VMEM) -> float:
    """Returns the FLOPs that a grouped matmul computes beyond those of its rows, 0 for any other instruction.

    A tile with rows of two experts is computed once for each.

    Args:
      one: the instruction.
      room: size of the buffer of rows, as a multiple of the rows that arrive.
      vmem: bytes of vector memory that the kernel may take.
    """
    of = _sizes(one, room)
    return 0.0 if of is None else _tiles(one, vmem).computed(of) - 2.0 * of.rows * of.summed * of.out


def grouped_bytes(one: Instruction, room: float = 1, vmem: int = DEFAULT_VMEM) -> float | None:
    """Returns the bytes that a grouped matmul reads and writes, None for any other instruction.

    Args:
      one: the instruction.
      room: size of the buffer of rows, as a multiple of the rows that arrive.
      vmem: bytes of vector memory that the kernel may take.
    """
    of = _sizes(one, room)
    return None if of is None else _tiles(one, vmem).moved(of)


def _tiles(one: Instruction, vmem: int) -> Tiles:
    """Returns the tiles of the kernel, which knows the size of its buffer only."""
    of = _sizes(one, 1)
    assert of is not None
    return choose_tiles(dataclasses.replace(of, vmem=vmem))


def _sizes(one: Instruction, room: float) -> Sizes | None:
    if one.opcode != "custom-call" or (found := _KERNEL.search(one.rest)) is None:
        return None
    *_, (kind, left, _), (_, right, _) = shapes_of(found[1])
    out = next(shapes_of(one.type))[1]
    transposed = found[2] is None
    matrices = out if transposed else right
    widths = _width(kind), round(size_of(one.type) / math.prod(out))
    rows = math.ceil(left[0] / room)
    return Sizes(rows, left[1], right[1] if transposed else out[1], matrices[0], *widths, transposed)


def _width(kind: str) -> int:
    return int(size_of(f"{kind}[1]"))
