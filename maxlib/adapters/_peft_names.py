"""Modules of transformers, by the table of a model's weights: which layers of ours each of them holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxlib import nn, quantization, weights
from maxlib.adapters._apply import dimensions, merge
from maxlib.nn import _sites as sites
from maxlib.nn._layer_axis import layer_axis, without_layer_axis
from maxlib.weights._family import family_of
from maxlib.weights._resolve import Piece, resolve

_PER_EXPERT = re.compile(r"\{e\}\.\w+\.weight$")


@dataclass(frozen=True)
class Part:
    """A layer's matrix as a part of a module of transformers.

    Attributes:
        site: Dotted path of the layer.
        short: Its pattern path.
        piece: The part of the module's tensor.
        lengths: Length of every axis of the tensor.
        experts: Axes that count experts.
        kept: Axes of outputs.
        summed: Axes of inputs.
    """

    site: str
    short: str
    piece: Piece
    lengths: dict[str, int]
    experts: tuple[str, ...]
    kept: tuple[str, ...]
    summed: tuple[str, ...]

    @property
    def expert(self) -> int | None:
        """Returns the number of the expert, None if the module holds all or has none."""
        return next(iter(self.piece.counted.values()), None)

    @property
    def key(self) -> tuple[str, int | None]:
        """Returns the pattern path and the number of the layer."""
        return self.short, self.piece.place.layer

    def size(self, axes: tuple[str, ...]) -> int:
        """Returns the length of the tensor's dimension that has `axes`."""
        return int(np.prod([self.lengths[a] for a in self.group(axes)]))

    def view(self, array: np.ndarray, axis: int, axes: tuple[str, ...]) -> np.ndarray:
        """Returns a view of this part of `array`, whose dimension `axis` of theirs becomes our `axes`."""
        group = self.group(axes)
        split = array.reshape(*array.shape[:axis], *(self.lengths[a] for a in group), *array.shape[axis + 1 :])
        sizes, at = dict(zip(self.piece.ours, self.piece.place.shape, strict=True)), self.piece.at
        index = [slice(at.get(a, 0), at.get(a, 0) + sizes[a]) if a in sizes else at[a] for a in group]
        taken = split[(*[slice(None)] * axis, *index, ...)]
        kept = [a for a in group if a in sizes]
        order = [axis + kept.index(a) for a in axes]
        return taken.transpose(*range(axis), *order, *range(axis + len(kept), taken.ndim))

    def group(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return next(group for group in self.piece.groups if {*group} & {*axes})


@dataclass(frozen=True)
class Names:
    """Names of a model's weights in transformers.

    Attributes:
        parts: Parts of every module (or parameter of experts) that can be adapted.
        whole: Paths of leaves that are a whole tensor, by the tensor's name.
        tables: Modules that are embeddings or heads.
        table: The table of weights.
        family: Name of the family.
    """

    parts: dict[str, list[Part]]
    whole: dict[str, str]
    tables: set[str]
    table: weights.Table
    family: str

    def ours(self, name: str) -> str:
        """Returns the spelling of `name` in the table."""
        for entry in self.table:
            name = entry.applied(name) if isinstance(entry, weights.Renamed) else name
        return _current(name)

    def theirs(self, name: str) -> str:
        """Returns the name of a module in transformers, which for some models differs from that in files."""
        for entry in self.table:
            if isinstance(entry, weights.Renamed) and entry.to and not entry.to.endswith(entry.theirs):
                name = entry.theirs + name.removeprefix(entry.to) if name.startswith(entry.to) else name
        return name


def names_of(model: Any, *, fused: bool = False) -> Names:
    """Returns the names of a model's weights.

    Args:
        model: A model of a registered family, with adapters and quantized weights or without.
        fused: True names experts as transformers 5 holds them, in two parameters, where files have a tensor for each.
    """
    plain = jax.eval_shape(lambda model: quantization.full_precision(merge(model)), model)
    family = family_of(model)
    table = family.table(model.cfg)
    table = [entry for e in table for entry in _fused(e)] if fused else table
    found, short = dict(sites.find(plain, sites.SITES)), nn.tree.pattern_paths(plain)
    parts: dict[str, list[Part]] = {}
    whole, tables = {}, set()
    for name, tensor in resolve(plain, table).tensors.items():
        lengths = dict(zip([a for group in tensor.pieces[0].groups for a in group], tensor.lengths, strict=True))
        for piece in tensor.pieces:
            path = piece.place.path
            site = found.get(path.removesuffix(".w"))
            if len(tensor.pieces) == 1 and piece.place.index is None:
                whole[name] = path
            # A module in which heads of several of our layers alternate has no adapter of ours.
            if site is None or not path.endswith(".w") or piece.one_by_one:
                continue
            one = site if layer_axis(site) is None else without_layer_axis(_first(site))
            part = Part(path[:-2], short[path][:-2], piece, lengths, *_axes(one, piece))
            module = _current(name.removesuffix(".weight"))
            parts.setdefault(module, []).append(part)
            tables |= {module} if isinstance(site, nn.Embed) else set()
    return Names(parts, whole, tables, table, family.name)


def _current(module: str) -> str:
    """Returns the name of a module of Mixtral in transformers 5; single experts keep that of files."""
    return module if ".experts." in module else module.replace(".block_sparse_moe.", ".mlp.")


def _first(site: Any) -> Any:
    """Returns the shapes of the first layer of several."""
    return jax.eval_shape(lambda site: jax.tree.map(lambda a: a[0], site), site)


def _axes(site: Any, piece: Piece) -> list[tuple[str, ...]]:
    """Returns the names of the axes of experts, outputs and inputs."""
    if isinstance(site, nn.Embed):
        return [(), piece.ours[:1], piece.ours[1:]]
    return [tuple(piece.ours[d] for d in dims) for dims in dimensions(site)]


def _fused(entry: weights.Entry) -> Sequence[weights.Entry]:
    """Returns the entry of all experts together in place of one per expert: gate first, then up, then down."""
    if not isinstance(entry, weights.Weight) or not _PER_EXPERT.search(entry.theirs):
        return [entry]
    stem = entry.theirs.partition(".{e}.")[0].replace("block_sparse_moe", "mlp")
    part = entry.ours.split(".")[-2]
    if part == "down":
        return [weights.Weight(f"{stem}.down_proj", entry.ours, "e O I -> e O I")]
    at = {"two": ("gate", "up").index(part)}
    return [weights.Weight(f"{stem}.gate_up_proj", entry.ours, "e (two O) I -> e O I", at=at)]
