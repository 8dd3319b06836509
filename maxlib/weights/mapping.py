"""Applies a weight table to a model: maps every tensor, down to slices, to parameters.

Terms in this file, from the largest to the smallest:

- **WeightMapping**: the complete mapping of one model, made by `resolve`.
- **Tensor**: a tensor in the files, made of pieces.
- **Piece**: a part of a file's tensor that is a part of one leaf of the model, axis by axis; from a `Weight`.
- **Conversion**: tensors that a function converts to a leaf; from a `Convert`.
- **ParamSlot**: a leaf of the model, or one layer of a leaf that a stack stores with a leading axis.
- **Cut**: a slice for each axis of a slot, such as the part on one device.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from maxlib import nn
from maxlib.weights._table import Absent, Axes, Convert, Table, Weight, parse

Cut = tuple[slice, ...]


@dataclass(frozen=True)
class ParamSlot:
    """A leaf, or one repeat of a leaf that a stack stores; `shape` is without the repeat axis."""

    path: str
    index: int | None
    shape: tuple[int, ...]
    layer: int | None = None

    def __str__(self) -> str:
        return self.path if self.index is None else f"{self.path}[{self.index}]"


@dataclass(frozen=True)
class Piece:
    """A part of a file's tensor that is a part of a parameter, axis by axis."""

    hf_name: str
    place: ParamSlot
    groups: tuple[Axes, ...]
    leaf_axes: Axes
    at: Mapping[str, int]
    counted: Mapping[str, int]
    one_by_one: bool = False  # True if a separate entry fills this index of the parameter

    @cached_property
    def box(self) -> list[tuple[int, int]]:
        """Returns begin and end on every axis of the file's tensor, before grouping."""
        sizes = dict(zip(self.leaf_axes, self.place.shape, strict=True))
        axes = [a for group in self.groups for a in group]
        return [(self.at.get(a, 0), self.at.get(a, 0) + sizes.get(a, 1)) for a in axes]

    def meets(self, other: "Piece") -> bool:
        """Returns True if both use some value of the same tensor."""
        return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(self.box, other.box, strict=True))

    @property
    def size(self) -> int:
        return math.prod(n for a, n in zip(self.leaf_axes, self.place.shape, strict=True) if a not in self.counted)

    def in_leaf_order(self, tensor: np.ndarray, lengths: tuple[int, ...], cut: Cut) -> np.ndarray:
        """Returns a view of the part `cut` of this piece of `tensor`, with its axes in the parameter's order.

        Example: `"(n h) d -> d n h"` of a tensor [N * H, D]: `lengths` is [N, H, D]; the slices of `cut` are taken on
        [n, h, d], and the view is transposed to [d, n, h]. An axis that only the tensor has is taken at its index in
        `at`.
        """
        part = dict(zip(self.leaf_axes, cut, strict=True))
        axes = [a for group in self.groups for a in group]
        start = {a: self.at.get(a, 0) for a in axes}
        select = tuple(
            slice(start[a] + part[a].start, start[a] + part[a].stop) if a in part else start[a] for a in axes
        )
        kept = [a for a in axes if a in part]
        return tensor.reshape(lengths)[(*select, ...)].transpose([kept.index(a) for a in self.leaf_axes if a in kept])

    def dimension(self, axes: Axes) -> int:
        """Returns the dimension of the file's tensor that has `axes`."""
        return next(n for n, group in enumerate(self.groups) if {*group} & {*axes})

    def in_axes(self, array: np.ndarray, lengths: Mapping[str, int], dimension: int, axes: Axes) -> np.ndarray:
        """Returns a view of the part of this piece along one dimension, split into `axes` of the parameter.

        Args:
            array: Any array with a dimension as long as the tensor's that has `axes`, such as a factor of the tensor.
            lengths: Sizes of the tensor's axes before grouping.
            dimension: Which dimension of `array` it is.
            axes: Axes of the parameter, in its order.
        """
        group = self.groups[self.dimension(axes)]
        before, after = array.shape[:dimension], array.shape[dimension + 1 :]
        sizes = dict(zip(self.leaf_axes, self.place.shape, strict=True))
        start = {a: self.at.get(a, 0) for a in group}
        index = [slice(start[a], start[a] + sizes[a]) if a in sizes else start[a] for a in group]
        taken = array.reshape(*before, *(lengths[a] for a in group), *after)[(*[slice(None)] * dimension, *index, ...)]
        kept = [a for a in group if a in sizes]
        order = [dimension + kept.index(a) for a in axes]
        return taken.transpose(*range(dimension), *order, *range(dimension + len(kept), taken.ndim))

    def within(self, cut: Cut) -> tuple[Any, ...] | None:
        """Returns the index of this piece in an array with the part `cut` of the leaf; None if it is outside."""
        places: list[Any] = []
        for axis, part in zip(self.leaf_axes, cut, strict=True):
            if axis not in self.counted:
                places.append(slice(None))
            elif part.start <= self.counted[axis] < part.stop:
                places.append(self.counted[axis] - part.start)
            else:
                return None
        return (*places, ...)  # without the ellipsis a full index returns a number, not a view


@dataclass(frozen=True)
class Conversion:
    """A `Convert` for one parameter slot."""

    hf_names: tuple[str, ...]
    place: ParamSlot
    entry: Convert

    @property
    def size(self) -> int:
        return math.prod(self.place.shape)


@dataclass(frozen=True)
class Tensor:
    """A file's tensor, made of pieces. `lengths` are the sizes of its axes before grouping."""

    name: str
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class WeightMapping:
    """All uses of the table, in layer order; those outside of stacks come first."""

    pieces: list[Piece]
    conversions: list[Conversion]
    absent: set[str]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Returns the files' tensors that are made of pieces.

        Raises ValueError if pieces of one tensor do not fit together.
        """
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.hf_name, []).append(piece)
        return {name: _join(name, pieces) for name, pieces in by_name.items()}

    @cached_property
    def filling(self) -> dict[str, list[Piece | Conversion]]:
        """Returns the pieces and conversions that fill each leaf, by path."""
        by_path: dict[str, list[Piece | Conversion]] = {}
        for use in [*self.pieces, *self.conversions]:
            by_path.setdefault(use.place.path, []).append(use)
        return by_path


def resolve(model: Any, table: Table) -> WeightMapping:
    """Applies `table` to `model` (or its `jax.eval_shape`)."""
    leaves = {path: v.get_value().shape for path, v in nn.variables(model).items()}
    numbered = list(enumerate(e for e in table if isinstance(e, Weight | Convert)))
    uses = [(place.layer, n, entry, place) for n, entry in numbered for place in param_slots(model, leaves, entry)]
    uses.sort(key=lambda use: (-1 if use[0] is None else use[0], use[1]))
    pieces = [p for _, _, e, place in uses if isinstance(e, Weight) for p in _pieces(e, place)]
    conversions = [
        Conversion(tuple(_fill(t, i=place.layer) for t in e.hf_names), place, e)
        for _, _, e, place in uses
        if isinstance(e, Convert)
    ]
    absent = {place.path for e in table if isinstance(e, Absent) for place in param_slots(model, leaves, e)}
    return WeightMapping(pieces, conversions, absent)


def param_slots(
    model: Any, leaves: Mapping[str, tuple[int, ...]], entry: Weight | Convert | Absent
) -> Iterator[ParamSlot]:
    """Yields the model's parameters, or slices of stacked ones, that match the path of `entry`."""
    before, layered, after = entry.path.partition("{i}")
    if not layered:
        if entry.path in leaves:
            yield ParamSlot(entry.path, None, leaves[entry.path])
        return
    layers = _child(model, before.rstrip("."))
    for i in range(0 if layers is None else len(layers)):
        where, index = layers.where(i) if isinstance(layers, nn.Stack) else (str(i), None)
        path = before + where + after
        if path in leaves:
            yield ParamSlot(path, index, leaves[path][0 if index is None else 1 :], i)


def _child(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdecimal() else getattr(model, name, None)
    return model


def _pieces(entry: Weight, place: ParamSlot) -> Iterator[Piece]:
    """Yields a piece for every value of the placeholders, except the layer's."""
    groups, leaf_axes = parse(entry.pattern, len(place.shape))
    in_leaf, in_file = {*leaf_axes}, {a for group in groups for a in group}
    counters = [a for a in re.findall(r"\{(\w+)\}", entry.hf_name) if a != "i"]
    if in_leaf - in_file != {*counters, *entry.index} or not in_file - in_leaf <= entry.at.keys() <= in_file:
        raise ValueError(
            f"{entry}: each axis must be on both sides of the pattern, or on the right with a placeholder of its name, or on "
            "the left with its index in `at`, or on the right with its index in `index`"
        )
    sizes = dict(zip(leaf_axes, place.shape, strict=True))
    for values in itertools.product(*[range(sizes[a]) for a in counters]):
        counted = dict(zip(counters, values, strict=True))
        name = _fill(entry.hf_name, i=place.layer, **counted)
        yield Piece(name, place, groups, leaf_axes, entry.at, {**counted, **entry.index}, bool(entry.index))


def _fill(template: str, **values: int | None) -> str:
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


def _join(name: str, pieces: list[Piece]) -> Tensor:
    structures = {tuple(len(group) for group in piece.groups) for piece in pieces}
    if len(structures) > 1:
        raise ValueError(f"{name}: its weights describe it with different axes; use the same left side for all of them")
    lengths = tuple(max(stop for _, stop in column) for column in zip(*[p.box for p in pieces], strict=True))
    overlap = any(a.meets(b) for a, b in itertools.combinations(pieces, 2))
    if overlap or sum(piece.size for piece in pieces) != math.prod(lengths):
        parts = ", ".join(str(piece.place) for piece in pieces)
        raise ValueError(f"{name}: its weights ({parts}) must fill it exactly, without gap or overlap; see `at`")
    ends = list(itertools.accumulate(structures.pop(), initial=0))
    shape = tuple(math.prod(lengths[a:b]) for a, b in itertools.pairwise(ends))
    return Tensor(name, tuple(pieces), shape, lengths)
