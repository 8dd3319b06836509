"""Groups of a stack's layers: which layers are stored together, to be scanned, and which are stored alone.

A stack of 12 layers with `lead=2, prefix=1, period=3`, where equal letters are layers of equal structure:

    layer      0 1 | 2 | 3 4 5  6 7 8 | 9 10 11 -> all of 3 ... 11 fill periods, so nothing is left over
    kind       D D | E | A B C  A B C | A B  C
    group      lead  prefix      body               suffix (empty here)
    stored as  lead.0 (2 layers), prefix.0, body.0 (A, 3 layers), body.1 (B, 3 layers), body.2 (C, 3 layers)

`lead` and `body` are scanned: each of their slots is one layer whose arrays have a leading axis of repeats. `prefix`
and `suffix` hold layers one by one. They run in the order lead, prefix, body, suffix. With `lead_period=2` the lead
repeats in periods too: `lead=4` is lead.0 and lead.1 with 2 layers each.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

Grouping = dict[str, int]


class LayerGroup(NamedTuple):
    """Consecutive layers of a stack that are stored in the same way, in `slots` slots from layer `first` on.

    Args:
        first: Index of the first layer.
        slots: Number of layers in a period, or of layers that are stored alone.
        repeats: Number of layers in each slot, on a leading axis; None if each slot is a single layer without that
            axis.
    """

    first: int
    slots: int
    repeats: int | None = None

    @property
    def end(self) -> int:
        """Returns one past the index of the last layer."""
        return self.first + self.slots * (1 if self.repeats is None else self.repeats)

    def layers(self, slot: int) -> range:
        """Returns the indices of the layers in a slot, in the order of its leading axis."""
        # Slot s holds the layers first + s, first + s + slots, first + s + 2 * slots, ...
        return range(self.first + slot, self.end, self.slots)


def grouping_for(kinds: Iterable[Hashable]) -> Grouping:
    """Finds the grouping that traces the fewest layers, as keyword arguments for `nn.Stack`.

    It has a `lead` if a separate scan of the first layers saves traces and the body has other kinds of layers.

    Args:
        kinds: A value for each layer, in order; equal values mean equal structure (its mask, for example).

    Returns:
        `prefix` and `period`, `lead` if there is one, and `lead_period` if that is more than one layer.
    """
    kinds = tuple(kinds)
    least, prefix, period = _scanned(kinds)
    found = {"prefix": prefix, "period": period}
    for every in range(1, len(kinds) // 2 + 1):
        lead = _run_length(kinds, every)
        own, rest = {*kinds[:lead]}, kinds[lead:]
        # A lead of one period scans nothing; if it has all kinds of the rest, it is the body itself.
        if lead < 2 * every or own >= {*rest}:
            continue
        # With a lead: one trace for each layer of its period, plus the traces of the rest.
        traced, prefix, period = _scanned(rest)
        # Without the layers after the last whole period.
        body = rest[prefix : len(rest) - (len(rest) - prefix) % period]
        # A kind in both lead and body (Gemma 3's local layers) would be traced twice; a single body is better.
        if every + traced < least and own.isdisjoint(body):
            least, found = every + traced, {"lead": lead, "prefix": prefix, "period": period}
            found |= {"lead_period": every} if every > 1 else {}
    return found


def _run_length(kinds: tuple[Hashable, ...], period: int) -> int:
    """Returns how many of the first layers consist of equal periods."""
    end = period
    while end + period <= len(kinds) and kinds[end : end + period] == kinds[:period]:
        end += period
    return end


def _scanned(kinds: tuple[Hashable, ...]) -> tuple[int, int, int]:
    """Returns the fewest layers to trace, with the prefix and the period that achieve it."""
    n = len(kinds)

    def repeats(prefix: int, period: int) -> bool:
        # Whole periods end here; the suffix follows. All periods are equal if each equals the next.
        end = n - (n - prefix) % period
        return kinds[prefix : end - period] == kinds[prefix + period : end]

    # prefix, one period, suffix
    traced = lambda prefix, period: prefix + period + (n - prefix) % period
    groupings = [(traced(a, p), a, p) for p in range(1, n + 1) for a in range(n - p + 1) if repeats(a, p)]
    return min(groupings, default=(0, 0, 1))


def layer_groups(
    *, num_layers: int, prefix: int, period: int, lead: int = 0, lead_period: int = 1
) -> dict[str, LayerGroup]:
    """Returns the groups that a stack with this grouping stores in `lead`, `prefix`, `body` and `suffix`."""
    start = lead + prefix
    repeats = (num_layers - start) // period
    end = start + repeats * period
    return {
        "lead": LayerGroup(0, min(lead, lead_period), lead // lead_period),
        "prefix": LayerGroup(lead, prefix),
        "body": LayerGroup(start, period if repeats else 0, repeats),
        "suffix": LayerGroup(end, num_layers - end),
    }


def layers_by_slot(grouping: Grouping) -> dict[str, list[tuple[int, int | None]]]:
    """Returns the layers of each slot, such as `"body.0"`: `(layer index, index on the leading axis or None)`."""
    return {
        f"{name}.{slot}": [
            (layer, None if group.repeats is None else row) for row, layer in enumerate(group.layers(slot))
        ]
        for name, group in layer_groups(**grouping).items()
        for slot in range(group.slots)
    }


def locate(i: int, **grouping: int) -> tuple[str, int | None]:
    """Returns the slot of layer `i` in a stack with this grouping, and its index on the leading axis or None.

    Raises:
        IndexError: when there is no layer `i`.
    """
    for name, group in layer_groups(**grouping).items():
        if group.first <= i < group.end:
            # Layers of a group are in the order of its periods: i - first = repeat * slots + slot.
            repeat, slot = divmod(i - group.first, group.slots)
            return f"{name}.{slot}", None if group.repeats is None else repeat
    raise IndexError(f"layer {i} of a stack of {grouping['num_layers']}")


def group_at(path: str, groupings: Mapping[str, Grouping]) -> tuple[str, LayerGroup] | None:
    """Finds the group that stores the layer at a path of a model.

    Args:
        path: Dotted path below the model, such as `"layers.body.0.attn.q"`.
        groupings: The grouping of every stack by its path, from `nn.tree.groupings`.

    Returns:
        The group's path, such as `"layers.body"`, and the group; None for a path that is in no stack.
    """
    for stack, grouping in groupings.items():
        for name, group in layer_groups(**grouping).items():
            here = f"{stack}.{name}" if stack else name
            if path.startswith(f"{here}."):
                return here, group
    return None


def as_grouping(num_layers: int, lead: int, prefix: int, period: int, lead_period: int = 1) -> Grouping:
    """Returns a grouping as a dict, as checkpoints store it; `lead` and `lead_period` are omitted if there is
    no lead.
    """
    grouping = {"num_layers": num_layers, "prefix": prefix, "period": period}
    if lead:
        grouping["lead"] = lead
        if lead_period > 1:
            grouping["lead_period"] = lead_period
    return grouping


def normalized_grouping(num_layers: int, lead: int, prefix: int, period: int, lead_period: int = 1) -> Grouping:
    """Returns the grouping with layers that would be scanned only once stored alone.

    Raises:
        ValueError: when the numbers are negative or larger than the stack, or the lead does not consist of whole
            periods.
    """
    if lead_period < 1 or lead % lead_period:
        raise ValueError(f"lead_period must be at least 1 and divide lead, got lead={lead}, lead_period={lead_period}")
    if period < 1 or min(lead, prefix) < 0 or lead + prefix > num_layers:
        raise ValueError(
            "period must be at least 1, lead and prefix not negative, and lead + prefix between 0 and num_layers; "
            f"got period={period}, lead={lead}, prefix={prefix}, num_layers={num_layers}"
        )
    # A scan of one repeat saves nothing, so a single lead period or body period joins the prefix.
    if lead == lead_period:
        lead, prefix = 0, prefix + lead
    if (num_layers - lead - prefix) // period == 1:
        prefix += period
    return as_grouping(num_layers, lead, prefix, period, lead_period)
