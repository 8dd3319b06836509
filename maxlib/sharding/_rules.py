"""Turns axis names into partition specs, by a table of plain rules.

For example, with the rules `{"embed": "fsdp", "mlp": "tensor"}` a weight named `("embed", "mlp")` has the spec
`P("fsdp", "tensor")`.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import AxisRules, IfFree, MeshAxes, Name, check_axes, mesh_axes_of, num_layer_axes


def resolve(names: Iterable[Name], rules: AxisRules) -> dict[Any, Any]:
    """Returns the rule of each name when all of them are used together.

    Args:
        names: Axes of one array, or of all arrays of a call.
        rules: From axis name to mesh axes.

    Returns:
        A dict from name to mesh axes. An `IfFree` is replaced by those of its mesh axes that no other name uses.
    """
    # rules {"mlp": "tensor", "seq": IfFree("tensor")}: ("batch", "seq", "embed") splits seq over tensor, ("seq", "mlp")
    # leaves it to mlp.
    places = {name: _rule(name, rules) for name in names if name is not None}
    taken = {axis for place in places.values() for axis in _certain(place)}

    def resolved(place: MeshAxes) -> MeshAxes:
        if not any(isinstance(member, IfFree) for member in _members(place)):
            return place
        certain = _certain(place)
        return tuple(axis for axis in mesh_axes_of(place) if axis in certain or axis not in taken) or None

    return {name: resolved(place) for name, place in places.items()}


def _members(place: MeshAxes) -> tuple[str | IfFree | None, ...]:
    return place if isinstance(place, tuple) else (place,)


def _certain(place: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of a rule that are used whether they are free or not."""
    return tuple(axis for axis in _members(place) if isinstance(axis, str))


def _rule(name: Name, rules: AxisRules) -> MeshAxes:
    """Returns the rule of one name; `IfFree("batch")` yields to the other names of the same array."""
    if isinstance(name, IfFree):
        return IfFree(mesh_axes_of(rules.get(str(name.axes))))
    return None if name is None else rules.get(name)


def spec(names: tuple[Name, ...], rules: AxisRules, *, what: str = "array") -> P:
    """Returns the partition spec of an array whose dimensions have these names.

    Args:
        names: One for each dimension, None for a dimension that is not split.
        rules: From axis name to mesh axes.
        what: Description of the array, for error messages.

    Raises:
        ValueError: for a name that is not declared, or when two names use the same mesh axis.
    """
    check_axes(names, what)
    # A stack inside a scanned layer has two leading axes of layers; only the first one is split.
    inner = num_layer_axes(names) - 1
    names = (*names[:1], *[None] * inner, *names[1 + inner :]) if inner > 0 else names
    axes_of = resolve(names, rules)
    places = [axes_of[name] if name is not None else None for name in names]
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
    """Returns a spec without trailing None."""
    # XLA reports shardings in this form. P("x") and P("x", None) mean the same, but jit would compile for each.
    while places and places[-1] is None:
        places = places[:-1]
    return P(*places)


def split_further(spec: P, shape: tuple[int, ...], axes: tuple[str, ...], mesh: Any) -> P:
    """Adds mesh axes to the longest dimension that they divide.

    Args:
        spec: The spec of the array.
        shape: The shape of the array.
        axes: Mesh axes to add, except those that `spec` already uses or of size 1.
        mesh: The mesh.

    Returns:
        The new spec, or `spec` (without trailing None) if no dimension can be divided.
    """
    used = {axis for place in spec for axis in mesh_axes_of(place)}
    free = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    places = [*spec] + [None] * (len(shape) - len(spec))
    part = [size // parts(place, mesh) for size, place in zip(shape, places, strict=True)]
    fitting = [d for d in range(len(shape)) if part[d] % prod(mesh.shape[axis] for axis in free) == 0]
    if free and fitting:
        longest = max(fitting, key=lambda d: part[d])
        places[longest] = (*mesh_axes_of(places[longest]), *free)
    return partition(places)


def drop_uneven(spec: P, shape: tuple[int, ...], mesh: Any) -> tuple[P, list[int]]:
    """Drops mesh axes that do not divide their dimension.

    Args:
        spec: The spec of an array.
        shape: The shape of the array.
        mesh: The mesh.

    Returns:
        The spec, and the indices of the dimensions that lost an axis.
    """
    # Drop axes from the right: 4 rows over ("data", "fsdp") of 2 x 4 devices stay split over "data".
    places = [_dividing(mesh_axes_of(place), size, mesh) for place, size in zip(spec, shape, strict=False)]
    uneven = [d for d, place in enumerate(spec) if places[d] != mesh_axes_of(place)]
    return P(*[places[d] or None if d in uneven else place for d, place in enumerate(spec)]), uneven


def _dividing(axes: tuple[str, ...], size: int, mesh: Any) -> tuple[str, ...]:
    """Returns the longest prefix of `axes` that divides `size`."""
    while size % parts(axes, mesh):
        axes = axes[:-1]
    return axes


def parts(place: MeshAxes, mesh: Any) -> int:
    """Returns the number of parts into which a rule splits a dimension."""
    return prod(mesh.shape[axis] for axis in mesh_axes_of(place))
