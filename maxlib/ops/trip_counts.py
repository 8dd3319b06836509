"""How often loops of operations run whose trip counts depend on data: what a plan, which has only shapes, assumes.

Attention in blocks visits the blocks of keys that a query sees, and a grouped matmul the tiles of rows that an expert
has. In a compiled program such a loop counts once, so a plan multiplies it by its average trip count.
"""

import re
from collections.abc import Mapping

from maxlib.ops._attention.chunked import chunked_tiles
from maxlib.ops._grouped_matmul.tiled import tiled_tiles

TripCounts = Mapping[str, float]
"""Average trip counts of loops over "attention", "experts" and "tiles"."""

_SIZES = r"tensor<((?:\d+x){4,})"
# The definition of an operation in a lowered program, with the sizes of its first two operands on one device.
_ATTENTION = re.compile(rf"maxlib\.ops\.attention\w*\(%arg0: {_SIZES}\w+>, %arg1: {_SIZES}")
_LOOP, _FUNCTION = "stablehlo.while", "func.func "
_GROUPED = re.compile(r"maxlib\.ops\.grouped_matmul\w*\(%arg0: tensor<(\d+)x\d+x\w+>, %arg1: tensor<(\d+)x")
# Loops of grouped matmuls in a compiled program, by the names of their instructions.
_OVER_EXPERTS = re.compile(r'op_name="[^"]*maxlib\.ops\.grouped_\w+\)/while"')
_OVER_TILES = re.compile(r'op_name="[^"]*maxlib\.ops\.grouped_\w+\)/while/.*while"')


def attention_trips(lowered: str, platform: str = "cpu") -> float:
    """Returns the average number of key blocks that blockwise attention visits per query block, under a causal mask.

    Args:
        lowered: The text of a lowered program.
        platform: "cpu", "gpu" or "tpu".

    Returns:
        `(blocks + 1) / 2` of the first attention that is a loop, other than a kernel; or 1 without any.
    """
    calls = (call for call in _ATTENTION.finditer(lowered) if _LOOP in _body(lowered, call.end()))
    call = next(calls, None)
    if call is None:
        return 1.0
    # [B, T, N, H] are the last four axes: in a pipeline, axes of stages and of parts come before them.
    q, k = (tuple(map(int, sizes[:-1].split("x")))[-4:] for sizes in call.groups())
    return (k[1] / chunked_tiles(q[1], q[2], k[1], platform).keys + 1) / 2


def _body(lowered: str, start: int) -> str:
    """Returns the rest of a function of a lowered program."""
    end = lowered.find(_FUNCTION, start)
    return lowered[start : None if end < 0 else end]


def grouped_matmul_trips(lowered: str, room: float = 1) -> dict[str, float]:
    """Returns the trip counts of grouped matmuls' loops, over experts and over tiles, if experts get equal shares.

    Args:
        lowered: The text of a lowered program.
        room: Size of the buffer of rows, as a multiple of the rows that arrive.
    """
    call = _GROUPED.search(lowered)
    if call is None:
        return {}
    rows, experts = map(int, call.groups())
    sizes = tiled_tiles(rows, experts).fit(rows)
    # An expert's rows are covered by tiles of decreasing sizes; on average half of the smallest one is padding.
    return {"experts": experts, "tiles": (rows / room / experts + sizes[-1] / 2) / sum(sizes)}


def trips_of_loop(instruction: str, trips: TripCounts) -> float:
    """Returns the trip count of a loop of the compiled program.

    Args:
        instruction: The text of the loop's instruction, with its `op_name`.
        trips: Average trip counts.
    """
    over_experts, over_tiles = _OVER_EXPERTS.search(instruction), _OVER_TILES.search(instruction)
    kind = "experts" if over_experts else "tiles" if over_tiles else "attention"
    return trips.get(kind, 1.0)
