"""A model's weight table: a list of entries that map Hugging Face tensors to parameters, used in both directions.

    Weight("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attn.q.w", "(N H) D -> N H D")

`{i}` in the parameter's path is every layer of the stack (or list) before it, independent of the grouping. Paths that a
model does not have, such as a bias, are skipped; a leaf without an entry and an unread tensor are errors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NO_OFFSETS: Mapping[str, int] = {}


@dataclass(frozen=True)
class Weight:
    """Maps a file's tensor, or a part of it, to a leaf of the model, or a part of it.

    Values are only sliced and transposed, never computed, so the same entry reads and writes.

    Attributes:
        hf_name: Name of the tensor.
        path: Path of the leaf.
        pattern: From the file's axes to the leaf's, as in einops, `"(N H) D -> N H D"`; the leaf's axes are not
            grouped. None means the same axes. An axis only on the right is indexed by the placeholder of that name:
            `"experts.{e}.w1.weight"` with `"F D -> e F D"`.
        at: For tensors shared by several weights, the offset on an axis at which this one begins; for an axis only on
            the left, its index. Fused projections are `"(R H) D -> R H D"` with `at={"R": 0}`, `{"R": num_heads}` and
            so on; a gate interleaved with its up projection is `"E D (F two) -> E F D"` with `at={"two": 0}`.
        index: For an axis only on the right without a placeholder, the index that this entry fills. Head 5 of the leaf,
            which the file stores in group 2 after other rows, is `"(G R) D -> N R D"` with `at={"G": 2, "R": 128}` and
            `index={"N": 5}`.
    """

    hf_name: str
    path: str
    pattern: str | None = None
    at: Mapping[str, int] = field(default_factory=dict)
    index: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Convert:
    """Tensors that a function converts to one leaf (of one layer).

    Attributes:
        hf_names: Names of the tensors.
        path: Path of the leaf.
        load: Function of the tensors that returns the leaf, all numpy.
        save: The inverse, from the leaf to a tuple of tensors. None makes the entry one-way: it applies if all its
            tensors are present, instead of the other entries of that leaf, and an export uses the others.
        batch: Number of common leading axes, over which `load` is applied index by index; only the indices that a
            device needs are read.
        dtype: The dtype that `load` returns; None means that of the first tensor.
    """

    hf_names: tuple[str, ...]
    path: str
    load: Callable[..., np.ndarray]
    save: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None
    batch: int = 0
    dtype: Any = "bfloat16"


@dataclass(frozen=True)
class Ignore:
    """Tensors without information about the model, such as rotary buffers. A placeholder matches any number, `*`
    anything.
    """

    hf_name: str

    def matches(self, name: str) -> bool:
        parts = re.split(r"(\{\w+\}|\*)", self.hf_name)
        wild = (".*" if part == "*" else r"\d+" if part.startswith("{") else re.escape(part) for part in parts)
        return re.fullmatch("".join(wild), name) is not None


@dataclass(frozen=True)
class Copy:
    """A tensor that duplicates another one, such as a stored tied head; if it is otherwise unused, it must be equal."""

    hf_name: str
    of: str


@dataclass(frozen=True)
class Constant:
    """A tensor that follows from the configuration: it is written, and a stored one must be equal.

    Attributes:
        hf_name: Name of the tensor.
        value: Its value.
    """

    hf_name: str
    value: np.ndarray


@dataclass(frozen=True)
class Absent:
    """A leaf that Hugging Face does not store: it keeps its initial value, and an export omits it."""

    path: str


@dataclass(frozen=True)
class Renamed:
    """Another prefix: a tensor whose name begins with `hf_prefix` is read as if it began with `to`.

    An empty `to` removes the prefix. If `to` begins with `hf_prefix`, names that already begin with `to` do not change.
    """

    hf_prefix: str
    to: str

    def applied(self, name: str) -> str:
        longer = self.to.startswith(self.hf_prefix) and name.startswith(self.to)
        fits = name.startswith(self.hf_prefix) and not longer
        return self.to + name.removeprefix(self.hf_prefix) if fits else name


Entry = Weight | Convert | Ignore | Copy | Constant | Absent | Renamed
Table = Sequence[Entry]
Axes = tuple[str, ...]


def parse(pattern: str | None, rank: int) -> tuple[tuple[Axes, ...], Axes]:
    """Splits a pattern into the file's axes, grouped by dimension, and the leaf's axes."""
    if pattern is None:
        names = tuple(f"axis{d}" for d in range(rank))
        return tuple((name,) for name in names), names
    left, arrow, right = pattern.partition("->")
    groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^()]*\)|[^\s()]+", left))
    left_axes, right_axes = [name for group in groups for name in group], tuple(right.split())
    if not arrow or "(" in right or len({*left_axes}) != len(left_axes) or len({*right_axes}) != len(right_axes):
        raise ValueError(
            f"a pattern must read like '(N H) D -> N H D', each axis once and the right side without groups; got {pattern!r}"
        )
    if len(right_axes) != rank:
        raise ValueError(f"the pattern {pattern!r} names {len(right_axes)} axes on the right, but the leaf has {rank}")
    return groups, right_axes
