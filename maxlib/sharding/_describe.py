"""Prints the parameters of a model as a table, with their placement."""

import dataclasses
from math import prod
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from rich import box
from rich.table import Table

from maxlib._utils.paths import dotted
from maxlib._utils.text import to_text
from maxlib.sharding._create import shardings
from maxlib.sharding._layout import Layout
from maxlib.sharding._mesh import MeshShape


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter in a `Description`.

    Args:
        path: Its dotted path in the model.
        shape: Its whole shape.
        dtype: Name of its dtype.
        axes: Its axis names, "-" for a dimension without one.
        place: Its partition spec as text.
        bytes: Size of the whole parameter.
        bytes_per_device: Size of one shard.
        devices: Number of devices that hold a part of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    place: str
    bytes: int
    bytes_per_device: int
    devices: int

    @property
    def copies(self) -> int:
        """Counts the devices that hold each shard."""
        # devices * bytes_per_device is the memory of all devices together.
        return self.devices * self.bytes_per_device // self.bytes if self.bytes else 1


@dataclasses.dataclass(frozen=True)
class Description:
    """The parameters of a model and their placement; prints as a table."""

    parameters: tuple[Parameter, ...]

    @property
    def bytes_per_device(self) -> int:
        """Sums the bytes of all parameters on one device."""
        return sum(parameter.bytes_per_device for parameter in self.parameters)

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, show_footer=True)
        table.add_column("parameter", footer="total", overflow="fold")
        for name in ("shape", "axes", "dtype", "place"):
            table.add_column(name, overflow="fold")
        table.add_column("copies", justify="right")
        table.add_column("per device", justify="right", footer=size(self.bytes_per_device))
        for parameter in self.parameters:
            shape = " ".join(map(str, parameter.shape)) or "scalar"
            copies, held = str(parameter.copies), size(parameter.bytes_per_device)
            table.add_row(
                parameter.path, shape, " ".join(parameter.axes), parameter.dtype, parameter.place, copies, held
            )
        return to_text(table, width=140)

    __repr__ = __str__


def describe(model: Any, layout: Layout | None = None) -> Description:
    """Lists shape, axis names, placement and bytes per device of every parameter; print the result.

    In the table, `place` has for each dimension the mesh axis that splits it ("-" for none, "whole" if no dimension is
    split), and `copies` the number of devices that hold the same part.

    Args:
        model: A module with arrays, or with `layout` its `jax.eval_shape`.
        layout: The layout to describe, with a mesh or axis sizes; None describes the arrays' current placement.

    Raises:
        ValueError: when a degree of the layout is -1, which needs devices, or as for `shardings`.
    """
    if layout is not None and isinstance(layout.mesh, MeshShape):
        layout = Layout(layout.mesh.abstract(), layout.strategy)
    places = jax.tree.map(_sharding, model) if layout is None else shardings(model, layout)

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable)
    parameters = tuple(
        _parameter(dotted(path), leaf, place)
        for (path, leaf), place in zip(leaves, jax.tree.leaves(places, is_leaf=is_variable), strict=True)
        if is_variable(leaf)
    )
    return Description(parameters)


def _sharding(x: Any) -> Any:
    return getattr(x, "sharding", None)


def _parameter(path: str, variable: nnx.Variable, place: Any) -> Parameter:
    value, sharding = variable.get_value(), place.get_value() if isinstance(place, nnx.Variable) else place
    shape, total = tuple(value.shape), prod(value.shape) * value.dtype.itemsize
    part = total if sharding is None else prod(sharding.shard_shape(shape)) * value.dtype.itemsize
    spec = getattr(sharding, "spec", None)
    words = "one device" if spec is None else " ".join(map(_word, spec)) or "whole"
    devices = 1 if sharding is None else _num_devices(sharding)
    axes = tuple(name or "-" for name in variable.get_metadata().get("axes", ()))
    return Parameter(path, shape, str(value.dtype), axes, words, total, part, devices)


def _num_devices(sharding: Any) -> int:
    return sharding.mesh.size if isinstance(sharding, NamedSharding) else sharding.num_devices


def _word(axes: Any) -> str:
    """Formats the mesh axes of one dimension: None, an axis, or a tuple of axes."""
    if axes is None:
        return "-"
    return axes if isinstance(axes, str) else "*".join(axes)


def size(count: float) -> str:
    """Formats a number of bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
