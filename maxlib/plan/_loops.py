"""How often those loops run that depend on data."""

import re
from collections.abc import Mapping

from maxlib.ops._grouped_matmul.tiled import tile_sizes

Trips = Mapping[str, float]

_GROUPED = re.compile(r"grouped_matmul\.api\._grouped_matmul\w*\(%arg0: tensor<(\d+)x\d+x\w+>, %arg1: tensor<(\d+)x")
_OVER_EXPERTS, _OVER_TILES = (
    re.compile(rf'op_name="[^"]*_grouped_\w+\){path}"') for path in ("/while", "/while/.*while")
)


def expert_trips(text: str, room: float = 1) -> dict[str, float]:
    """Of the loops in a lowered program over experts, and over tiles of rows of each size, when experts get equal
    shares. room: for how many times the rows that come there is room."""
    if (found := _GROUPED.search(text)) is None:
        return {}
    rows, experts = map(int, found.groups())
    sizes = tile_sizes(rows, experts)
    return {"experts": experts, "tiles": (rows / room / experts + sizes[-1] / 2) / sum(sizes)}


def trips_of(rest: str, trips: Trips) -> float:
    """Of a loop of the compiled program, by the name that it bears."""
    kind = "experts" if _OVER_EXPERTS.search(rest) else "tiles" if _OVER_TILES.search(rest) else "attention"
    return trips.get(kind, 1.0)
