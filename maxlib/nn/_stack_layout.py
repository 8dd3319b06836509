"""Segments of a stack: which layers are stored together, to be scanned, and which stand alone.

A stack of 12 layers with `lead=2, prefix=1, period=3`, where equal letters are layers that are alike:

    layer      0 1 | 2 | 3 4 5  6 7 8 | 9 10 11 -> all of 3 ... 11 fill periods, so nothing is left over
    kind       D D | E | A B C  A B C | A B  C
    segment    lead  prefix      body               suffix (empty here)
    stored as  lead.0 (2 layers), prefix.0, body.0 (A, 3 layers), body.1 (B, 3 layers), body.2 (C, 3 layers)

`lead` and `body` are scanned: each of their slots is one layer whose arrays have a leading axis of repeats. `prefix`
and `suffix` hold layers one by one. They run in the order lead, prefix, body, suffix.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

Layout = dict[str, int]


class Segment(NamedTuple):
    """Consecutive layers of a stack that are stored alike, in `slots` places from layer `first` on.

    Args:
        first: Number of the first layer.
        slots: Layers of a period, or layers that stand alone.
        repeats: Layers in each slot, on a leading axis; None where each slot is a layer that stands alone.
    """

    first: int
    slots: int
    repeats: int | None = None

    @property
    def end(self) -> int:
        """Number of the layer after the last one."""
        return self.first + self.slots * (1 if self.repeats is None else self.repeats)

    def layers(self, slot: int) -> range:
        """Returns the numbers of the layers in a slot, in the order of its leading axis."""
        return range(self.first + slot, self.end, self.slots)


def layout_for(kinds: Iterable[Hashable]) -> Layout:
    """Finds the layout that scans the most layers, as keyword arguments for `nn.Stack`.

    A `lead` is used where the first layers are of a kind that does not come again and scanning them traces fewer.

    Args:
        kinds: What distinguishes each layer (its mask, say), in order. Layers of one kind are alike.

    Returns:
        `prefix` and `period`, and `lead` where there is one.
    """
    kinds = tuple(kinds)
    own = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    traced, prefix, period = _scanned(kinds)
    if own > 1:
        rest, after, every = _scanned(kinds[own:])
        if 1 + rest < traced and kinds[0] not in kinds[own:]:
            return {"lead": own, "prefix": after, "period": every}
    return {"prefix": prefix, "period": period}


def _scanned(kinds: tuple[Hashable, ...]) -> tuple[int, int, int]:
    """Returns the least number of layers to trace, and the prefix and period that need no more."""
    n = len(kinds)

    def repeats(prefix: int, period: int) -> bool:
        end = n - (n - prefix) % period
        return kinds[prefix : end - period] == kinds[prefix + period : end]

    traced = lambda prefix, period: prefix + period + (n - prefix) % period
    layouts = [(traced(a, p), a, p) for p in range(1, n + 1) for a in range(n - p + 1) if repeats(a, p)]
    return min(layouts, default=(0, 0, 1))


def segments(*, num_layers: int, prefix: int, period: int, lead: int = 0) -> dict[str, Segment]:
    """Returns what a stack with this layout stores in its attributes `lead`, `prefix`, `body` and `suffix`."""
    start = lead + prefix
    repeats = (num_layers - start) // period
    end = start + repeats * period
    return {
        "lead": Segment(0, min(lead, 1), lead),
        "prefix": Segment(lead, prefix),
        "body": Segment(start, period if repeats else 0, repeats),
        "suffix": Segment(end, num_layers - end),
    }


def places(layout: Layout) -> dict[str, list[tuple[int, int | None]]]:
    """Maps each slot, such as `"body.0"`, to its layers: `(number, index on the leading axis or None)`."""
    return {
        f"{name}.{slot}": [
            (layer, None if segment.repeats is None else row) for row, layer in enumerate(segment.layers(slot))
        ]
        for name, segment in segments(**layout).items()
        for slot in range(segment.slots)
    }


def place_of(i: int, **layout: int) -> tuple[str, int | None]:
    """Returns the slot of layer `i` in a stack with this layout, and its index on the leading axis or None.

    Raises:
        IndexError: There is no layer `i`.
    """
    for name, segment in segments(**layout).items():
        if segment.first <= i < segment.end:
            repeat, slot = divmod(i - segment.first, segment.slots)
            return f"{name}.{slot}", None if segment.repeats is None else repeat
    raise IndexError(f"layer {i} of a stack of {layout['num_layers']}")


def segment_at(path: str, layouts: Mapping[str, Layout]) -> tuple[str, Segment] | None:
    """Finds the segment that stores the layer at a path of a model.

    Args:
        path: Dotted path below the model, such as `"layers.body.0.attn.q"`.
        layouts: The layout of every stack by its path, as `nn.tree.layouts` returns it.

    Returns:
        The segment's path, such as `"layers.body"`, and the segment; None for a path that lies in no stack.
    """
    for stack, layout in layouts.items():
        for name, segment in segments(**layout).items():
            here = f"{stack}.{name}" if stack else name
            if path.startswith(f"{here}."):
                return here, segment
    return None


def as_layout(num_layers: int, lead: int, prefix: int, period: int) -> Layout:
    """Names the numbers of a layout. Checkpoints hold it; without a lead it is as before there were any."""
    return {"num_layers": num_layers, "prefix": prefix, "period": period} | ({"lead": lead} if lead else {})


def normalized_layout(num_layers: int, lead: int, prefix: int, period: int) -> Layout:
    """Returns the layout in which a layer that would be scanned once stands alone.

    Raises:
        ValueError: The numbers are negative, or larger than the stack.
    """
    if period < 1 or min(lead, prefix) < 0 or lead + prefix > num_layers:
        raise ValueError(
            "period must be at least 1, lead and prefix not negative, and lead + prefix between 0 and num_layers; "
            f"got period={period}, lead={lead}, prefix={prefix}, num_layers={num_layers}"
        )
    if lead == 1:
        lead, prefix = 0, prefix + 1
    if (num_layers - lead - prefix) // period == 1:
        prefix += period
    return as_layout(num_layers, lead, prefix, period)
