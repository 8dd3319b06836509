"""How a stack stores its layers: in groups, whose periods of layers repeat; repeated layers share arrays.

A stack of 12 layers, where equal letters are layers of one kind:

    layer      0 1 | 2 3 | 4 5 6  7 8 9 | 10 11
    kind       D D | E F | A B C  A B C | A  B
    group      0   | 1   | 2            | 3
    period     1   | 2   | 3            | 2
    repeats    2   | 1   | 2            | 1
    stored as  groups.0.0 (D, 2 layers), groups.1.0 (E), groups.1.1 (F), groups.2.0 (A, 2 layers), groups.2.1 (B, 2
               layers), groups.2.2 (C, 2 layers), groups.3.0 (A), groups.3.1 (B)

Each layer of a period has a slot. If the period repeats, the arrays of a slot have a leading axis of repeats, and the
group is scanned; a group with one repeat stores its layers alone, without that axis.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from maxlib.nn.tree import is_variable
from maxlib.sharding.layers import is_stacked

# The period and the repeats of each group; lists where it was read from JSON.
Grouping = Sequence[Sequence[int]]
Tree = TypeVar("Tree")


class Group(NamedTuple):
    """Consecutive layers of a stack: a period of layers, and how often it repeats.

    Args:
        first: Index of the first layer.
        period: Number of layers in the period, each of which has a slot.
        repeats: Number of layers in each slot. With more than one, they are stored on a leading axis and scanned.
    """

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """Returns one past the index of the last layer."""
        return self.first + self.period * self.repeats

    def layers(self, slot: int) -> range:
        """Returns the indices of the layers in a slot, in the order of its leading axis."""
        return range(self.first + slot, self.end, self.period)


def number_kinds(kinds: Iterable[Hashable]) -> tuple[int, ...]:
    """Returns a number for each value, equal for equal values, in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds)


def find_groups(kinds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Finds groups for which few layers are traced.

    First the group whose repeats save most traces, then likewise among the layers before and after it. A kind repeats
    in one group only: Gemma 3's `sssssf sssssf ss` is a period of six and two single layers, not two scans of `s`. So
    most layers are in one group, which a pipeline can split.

    Args:
        kinds: A number for each layer, from `number_kinds`.

    Returns:
        The period and the repeats of each group. No two groups with one repeat follow each other.
    """
    repeated: set[int] = set()

    def group(first: int, period: int, end: int) -> Group:
        stop = first + period
        while stop + period <= end and kinds[stop : stop + period] == kinds[first : first + period]:
            stop += period
        return Group(first, period, (stop - first) // period)

    def groups_between(start: int, end: int) -> list[tuple[int, int]]:
        candidates = [
            group(first, period, end)
            for first in range(start, end)
            for period in range(1, (end - first) // 2 + 1)
            if repeated.isdisjoint(kinds[first : first + period])
        ]
        # Of groups that save as many traces the one with the shortest period, then the first.
        best = max(candidates, key=lambda g: (g.period * (g.repeats - 1), -g.period, -g.first), default=None)
        if best is None or best.repeats == 1:
            return [(end - start, 1)] if start < end else []
        repeated.update(kinds[best.first : best.first + best.period])
        return [*groups_between(start, best.first), (best.period, best.repeats), *groups_between(best.end, end)]

    return (*groups_between(0, len(kinds)),)


def layer_groups(grouping: Grouping) -> list[Group]:
    """Returns the groups of a stack with this grouping."""
    groups, first = [], 0
    for period, repeats in grouping:
        groups.append(Group(first, period, repeats))
        first = groups[-1].end
    return groups


def layers_by_slot(grouping: Grouping) -> dict[str, list[tuple[int, int | None]]]:
    """Returns the layers of each slot, such as `"groups.0.1"`: `(layer index, index on the leading axis or None)`."""
    return {
        f"groups.{n}.{slot}": [(i, row if group.repeats > 1 else None) for row, i in enumerate(group.layers(slot))]
        for n, group in enumerate(layer_groups(grouping))
        for slot in range(group.period)
    }


def group_at(path: str, groupings: Mapping[str, Grouping]) -> tuple[str, Group] | None:
    """Finds the group that stores the layer at a path of a model.

    Args:
        path: Dotted path below the model, such as `"layers.groups.0.0.attn.q"`.
        groupings: The grouping of every stack by its path, from `nn.tree.groupings`.

    Returns:
        The group's path, such as `"layers.groups.0"`, and the group; None for a path that is in no stack.
    """
    for stack, grouping in groupings.items():
        for n, group in enumerate(layer_groups(grouping)):
            here = f"{stack}.groups.{n}" if stack else f"groups.{n}"
            if path.startswith(f"{here}."):
                return here, group
    return None


def with_layer_axis(layer: Tree, name: str) -> Tree:
    """Names the leading axis of every variable: `(heads, embed)` becomes `(name, heads, embed)`.

    A variable without axis names gets None for its other dimensions, and a mark so that `without_layer_axis` removes
    them.
    """

    def add(variable: nnx.Variable) -> nnx.Variable:
        if "axes" in variable.get_metadata():
            return variable.copy(_copy_ref=False, axes=(name, *_axes(variable)))
        unnamed = (None,) * (variable.get_value().ndim - 1)
        return variable.copy(_copy_ref=False, axes=(name, *unnamed), unnamed=True)

    return _map_variables(add, layer)


def without_layer_axis(layer: Tree) -> Tree:
    """Undoes `with_layer_axis` for a layer that was sliced out of several."""

    def remove(variable: nnx.Variable) -> nnx.Variable:
        if not is_stacked(axes := _axes(variable)):
            return variable
        # Only metadata changes here: the caller has already taken one row of the array.
        metadata = variable.get_metadata() | {"axes": axes[1:]}
        if metadata.get("unnamed") and not is_stacked(axes[1:]):
            del metadata["axes"], metadata["unnamed"]
        return type(variable).from_metadata(variable.get_raw_value(), metadata)

    return _map_variables(remove, layer)


def layer_axis(layer: Any) -> str | None:
    """Returns the name of the leading axis if `layer` stores several layers, else None."""
    return next((_axes(variable)[0] for variable in _variables(layer) if is_stacked(_axes(variable))), None)


def map_layers(fn: Callable[[Any], Any], layer: Any) -> Any:
    """Applies `fn` to a layer; if several layers are stored together on a leading axis, to all of them with vmap."""
    if (name := layer_axis(layer)) is None:
        return fn(layer)
    # vmap removes the leading axis of arrays; `without_layer_axis` removes its name.
    return with_layer_axis(jax.vmap(lambda layer: fn(without_layer_axis(layer)))(layer), name)


def _map_variables(change: Callable[[nnx.Variable], nnx.Variable], tree: Any) -> Any:
    return jax.tree.map(lambda x: change(x) if is_variable(x) else x, tree, is_leaf=is_variable)


def _variables(tree: Any) -> Iterator[nnx.Variable]:
    return filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable))


def _axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Returns the axis names of a variable, `()` if it has none."""
    return tuple(variable.get_metadata().get("axes", ()))
