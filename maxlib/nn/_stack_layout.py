"""Where a stack keeps its layers: which of them share a place, to be scanned."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple


class Part(NamedTuple):
    """Layers of a stack that are stored alike: `slots` of them in turn, from layer `first` on.

    repeats: how many layers lie in a slot, on a leading axis; None where each slot is a layer that stands alone.
    """

    first: int
    slots: int
    repeats: int | None = None

    @property
    def end(self) -> int:
        return self.first + self.slots * (1 if self.repeats is None else self.repeats)

    def layers(self, slot: int) -> range:
        """The numbers of the layers in a slot."""
        return range(self.first + slot, self.end, self.slots)


def layout_for(kinds: Iterable[Hashable]) -> dict[str, int]:
    """The `prefix` and `period` that scan the most, given what distinguishes each layer (its mask, say).

    With a `lead` where that scans more: of first layers that are of a kind which does not come again.
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
    """How many layers are traced at least, and with which prefix and period."""
    n = len(kinds)

    def repeats(prefix: int, period: int) -> bool:
        end = n - (n - prefix) % period
        return kinds[prefix : end - period] == kinds[prefix + period : end]

    traced = lambda prefix, period: prefix + period + (n - prefix) % period
    layouts = [(traced(a, p), a, p) for p in range(1, n + 1) for a in range(n - p + 1) if repeats(a, p)]
    return min(layouts, default=(0, 0, 1))


def parts(*, num_layers: int, prefix: int, period: int, lead: int = 0) -> dict[str, Part]:
    """Which layers a stack with this layout keeps as its `lead`, `prefix`, `body` and `suffix`."""
    start = lead + prefix
    repeats = (num_layers - start) // period
    end = start + repeats * period
    return {
        "lead": Part(0, min(lead, 1), lead),
        "prefix": Part(lead, prefix),
        "body": Part(start, period if repeats else 0, repeats),
        "suffix": Part(end, num_layers - end),
    }


def place_of(i: int, **layout: int) -> tuple[str, int | None]:
    """Where layer `i` of a stack with this layout lies: its path, and its index on the repeat axis."""
    for name, part in parts(**layout).items():
        if part.first <= i < part.end:
            repeat, slot = divmod(i - part.first, part.slots)
            return f"{name}.{slot}", None if part.repeats is None else repeat
    raise IndexError(f"layer {i} of a stack of {layout['num_layers']}")


def as_layout(num_layers: int, lead: int, prefix: int, period: int) -> dict[str, int]:
    """Without a lead what it was before there were any: checkpoints hold it."""
    return {"num_layers": num_layers, "prefix": prefix, "period": period} | ({"lead": lead} if lead else {})


def settled(num_layers: int, lead: int, prefix: int, period: int) -> dict[str, int]:
    """The layout in which what would be scanned once stands alone."""
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
