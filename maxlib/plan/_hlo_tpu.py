"""Counts what JAX's grouped matmul kernels for TPUs (megablox) move.

Their own estimate counts an expert's matrix once for every tile of rows, although it stays on the chip meanwhile.
"""

import math
import re

from maxlib.ops._grouped_matmul.tiling import Sizes, choose_tiles
from maxlib.plan._hlo_text import Instruction, shapes_of, size_of

_KERNEL = re.compile(r'operand_layout_constraints=\{(.*?\})\}, .*op_name="[^"]*jit\((t?)gmm\)/[^"]*pallas_call"')


def grouped_bytes(one: Instruction) -> float | None:
    """Returns the bytes that a grouped matmul reads and writes, None for any other instruction."""
    if one.opcode != "custom-call" or (found := _KERNEL.search(one.rest)) is None:
        return None
    *_, (kind, left, _), (_, right, _) = shapes_of(found[1])
    out = next(shapes_of(one.type))[1]
    transposed = found[2] == "t"
    matrices = out if transposed else right
    widths = _width(kind), round(size_of(one.type) / math.prod(out))
    of = Sizes(left[0], left[1], right[1] if transposed else out[1], matrices[0], *widths, transposed)
    return choose_tiles(of).moved(of)


def _width(kind: str) -> int:
    return int(size_of(f"{kind}[1]"))
