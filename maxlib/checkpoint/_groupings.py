"""Matches stored leaves, or rows of them, to wanted leaves when the grouping of stacks has changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from maxlib import nn
from maxlib.checkpoint._errors import shorten

Groupings = Mapping[str, nn.stack.Grouping]
# A leaf of one layer: the stored leaf that has it, and its row there (None: the whole leaf).
Piece = tuple[str, int | None]


def layer_paths(name: str, groupings: Groupings) -> list[Piece]:
    """Names the leaf `name` layer by layer: `layers.groups.1.0.w` is `layers.1.w` row 0, `layers.3.w` row 1, ...

    The stack may lie under any path: an optimizer's moments are named `0.mu.layers.groups.1.0.w`.
    """
    parts = name.split(".")
    for stack in sorted(groupings, key=len, reverse=True):
        here, slots = stack.split(".") if stack else [], nn.stack.layers_by_slot(groupings[stack])
        width = len(next(iter(slots), "").split("."))  # of "groups.1.0"
        for start in range(len(parts) - len(here) - width + 1):
            end = start + len(here)
            rest = end + width
            if parts[start:end] == here and (layers := slots.get(".".join(parts[end:rest]))):
                return [(".".join([*parts[:end], str(i), *parts[rest:]]), row) for i, row in layers]
    return [(name, None)]


@dataclasses.dataclass(frozen=True)
class Target:
    """A wanted leaf: its shape and dtype, and the pieces that make it up; with `rows`, one piece for each index of its
    first axis.
    """

    raw: jax.ShapeDtypeStruct
    pieces: tuple[Piece, ...]
    rows: bool


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Part of a stored leaf that belongs to one layer."""

    piece: Piece
    shape: tuple[int, ...]
    dtype: str
    checksum: str

    def __str__(self) -> str:
        return _show(self.shape, self.dtype)


def match_leaves(
    entries: dict[str, dict[str, Any]],
    old: Groupings,
    wanted: dict[str, jax.ShapeDtypeStruct],
    new: Groupings,
    *,
    where: str,
    cast: bool,
) -> dict[str, Target]:
    """Finds every layer of every wanted leaf among a manifest's `entries`. Raises ValueError listing all mismatches."""
    source = _layers_of(entries, old)
    targets, missing, differ, used = {}, [], [], set()
    for name, raw in wanted.items():
        layers, rows = _split(name, raw.shape, new)
        shape = raw.shape[1:] if rows else raw.shape
        here = _show(shape, str(raw.dtype))
        stored = {logical: source[logical] for logical, _ in layers if logical in source}
        used |= set(stored)
        missing += [f"{logical} {here}" for logical, _ in layers if logical not in source]
        bad = {n: it for n, it in stored.items() if it.shape != shape or (it.dtype != str(raw.dtype) and not cast)}
        differ += [f"{logical}: saved {it}, wanted {here}" for logical, it in bad.items()]
        if not rows and len({it.checksum for it in stored.values()}) > 1:
            differ.append(f"{name}: a single value for the layers {list(stored)}, but different values were saved")
        targets[name] = Target(raw, tuple(it.piece for it in stored.values()), rows)
    _check_fit(where, missing, [f"{name} {it}" for name, it in source.items() if name not in used], differ)
    return targets


def _layers_of(entries: dict[str, dict[str, Any]], groupings: Groupings) -> dict[str, _Layer]:
    result = {}
    for name, entry in entries.items():
        layers, rows = _split(name, entry["shape"], groupings)
        shape = tuple(entry["shape"][1:] if rows else entry["shape"])
        for logical, row in layers:
            result[logical] = _Layer((name, row), shape, entry["dtype"], entry["checksum"])
    return result


def _split(name: str, shape: Any, groupings: Groupings) -> tuple[list[Piece], bool]:
    """Returns the layers of a leaf, and whether each has a row. An optimizer's placeholder has no rows: it represents
    all of them.
    """
    layers = layer_paths(name, groupings)
    if layers[0][1] is None or (len(shape) > 0 and shape[0] == len(layers)):
        return layers, layers[0][1] is not None
    return [(logical, None) for logical, _ in layers], False


def _check_fit(where: str, missing: list[str], extra: list[str], differ: list[str]) -> None:
    problems = {"it lacks": missing, "nothing takes": extra, "these differ": differ}
    if any(problems.values()):
        said = "\n".join(f"{what}:{shorten(names)}" for what, names in problems.items() if names)
        raise ValueError(
            f"What is wanted must be what was saved, but {where} does not fit.\n{said}\nBuild the model and the optimizer as they were "
            "(the checkpoint's meta has what the run recorded), restore fewer items, pass cast=True if only dtypes differ, or "
            "groupings= if only the groups of stacks do."
        )


def _show(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
