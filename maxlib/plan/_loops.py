"""Trip counts of loops that depend on data."""

import re
from collections.abc import Mapping

from maxlib.ops._grouped_matmul.tiled import tiled_tiles

Trips = Mapping[str, float]

_GROUPED = re.compile(r"grouped_matmul\.api\._grouped_matmul\w*\(%arg0: tensor<(\d+)x\d+x\w+>, %arg1: tensor<(\d+)x")
_OVER_EXPERTS, _OVER_TILES = (
    re.compile(rf'op_name="[^"]*_grouped_\w+\){path}"') for path in ("/while", "/while/.*while")
)


def expert_trips(text: str, room: float = 1) -> dict[str, float]:
    """Returns the trip counts of grouped matmuls' loops, over experts and over tiles, if experts get equal shares.

    Args:
        text: The lowered program.
        room: Size of the buffer of rows, as a multiple of the rows that arrive.
    """
    # An expert's rows are covered by tiles of decreasing sizes; on average half of the smallest one is padding.
    if (match := _GROUPED.search(text)) is None:
        return {}
    rows, experts = map(int, match.groups())
    sizes = tiled_tiles(rows, experts).fit(rows)
    return {"experts": experts, "tiles": (rows / room / experts + sizes[-1] / 2) / sum(sizes)}


def trips_of(rest: str, trips: Trips) -> float:
    """Returns the trip count of a loop of the compiled program, by the op_name of its instruction."""
    kind = "experts" if _OVER_EXPERTS.search(rest) else "tiles" if _OVER_TILES.search(rest) else "attention"
    return trips.get(kind, 1.0)
