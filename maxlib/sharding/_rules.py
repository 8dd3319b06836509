"""From axis names to partition specs, by a table of plain rules."""

from collections.abc import Iterable
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import IfFree, Name, Place, Table, check_axes, mesh_axes_of
from maxlib.sharding._layer_axes import num_layer_axes


def resolve(names: Iterable[Name], rules: Table) -> dict[Any, Any]:
    """Returns the mesh axes of these axes when they meet: an `IfFree` keeps those that nobody else takes."""
    found = {name: _rule(name, rules) for name in names if name is not None}
    taken = {axis for place in found.values() if not isinstance(place, IfFree) for axis in mesh_axes_of(place)}
    spare = lambda place: tuple(axis for axis in mesh_axes_of(place) if axis not in taken) or None
    return {name: spare(place) if isinstance(place, IfFree) else place for name, place in found.items()}


def _rule(name: Name, rules: Table) -> Place:
    if isinstance(name, IfFree):
        return IfFree(mesh_axes_of(rules.get(str(name.axes))))
    return None if name is None else rules.get(name)


def spec(names: tuple[Name, ...], rules: Table, *, what: str = "array") -> P:
    """Returns the partition spec of an array whose dimensions bear `names`.

    Args:
        names: of its axes; None for those without. Of several axes of layers (a stack inside a scanned layer) the
            first one counts.
        rules: from axis name to mesh axes.
        what: it is, for messages.

    Raises:
        ValueError: for a name that nobody declared, and when two names land on one mesh axis.
    """
    check_axes(names, what)
    inner = num_layer_axes(names) - 1
    names = (*names[:1], *[None] * inner, *names[1 + inner :]) if inner > 0 else names
    found = resolve(names, rules)
    places = [found[name] if name is not None else None for name in names]
    used: dict[str, Name] = {}
    for name, place in zip(names, places, strict=True):
        for axis in mesh_axes_of(place):
            if axis in used:
                raise ValueError(
                    f"{what}: its axes {names} put {used[axis]!r} and {name!r} both on the mesh axis {axis!r}; "
                    f"an array can use a mesh axis once, so change one of the rules {dict(rules)}"
                )
            used[axis] = name
    return partition(places)


def partition(places: list[Any]) -> P:
    """Makes a spec as XLA reports them, without what is whole at the end: jit compiles anew for P("x", None)."""
    while places and places[-1] is None:
        places = places[:-1]
    return P(*places)


def split_further(own: P, shape: tuple[int, ...], axes: tuple[str, ...], mesh: Any) -> P:
    """Returns `own` with those mesh axes that are not in use yet on the longest dimension that they divide."""
    used = {axis for place in own for axis in mesh_axes_of(place)}
    more = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    places = [*own] + [None] * (len(shape) - len(own))
    part = [size // parts(place, mesh) for size, place in zip(shape, places, strict=True)]
    fitting = [d for d in range(len(shape)) if part[d] % prod(mesh.shape[axis] for axis in more) == 0]
    if more and fitting:
        longest = max(fitting, key=lambda d: part[d])
        places[longest] = (*mesh_axes_of(places[longest]), *more)
    return partition(places)


def drop_uneven(own: P, shape: tuple[int, ...], mesh: Any) -> tuple[P, list[int]]:
    """Drops the mesh axes that do not divide a dimension; of several the first ones stay that divide it.

    Returns:
        The spec, and the indices of the dimensions that lost an axis.
    """
    places = [_dividing(mesh_axes_of(place), size, mesh) for place, size in zip(own, shape, strict=False)]
    uneven = [d for d, place in enumerate(own) if places[d] != mesh_axes_of(place)]
    return P(*[places[d] or None if d in uneven else place for d, place in enumerate(own)]), uneven


def _dividing(axes: tuple[str, ...], size: int, mesh: Any) -> tuple[str, ...]:
    while size % parts(axes, mesh):
        axes = axes[:-1]
    return axes


def parts(place: Place, mesh: Any) -> int:
    """Returns into how many parts mesh axes split a dimension."""
    return prod(mesh.shape[axis] for axis in mesh_axes_of(place))
