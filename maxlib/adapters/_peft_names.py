"""Maps modules of transformers to layers, by the weight table of a model."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxlib import nn, quantization, weights
from maxlib.adapters._apply import merge
from maxlib.nn import sites
from maxlib.weights.mapping import Piece, Tensor, resolve
from maxlib.weights.names import with_fused_experts

CURRENT = {".block_sparse_moe.": ".mlp.", ".mlp.shared_mlp.": ".mlp.shared_experts."}  # Mixtral, Hy3
CURRENT |= {f".self_attn.f_{x}_proj": f".self_attn.forget_gate.f_{x}_proj" for x in "ab"}  # Kimi Linear


@dataclass(frozen=True)
class Part:
    """A layer's matrix as a part of a transformers module."""

    site: str  # the dotted path of the layer
    short: str  # its pattern path
    piece: Piece  # the part of the module's tensor
    lengths: dict[str, int]  # of every axis of the tensor
    experts: tuple[str, ...]  # axes that count experts
    kept: tuple[str, ...]  # axes of outputs
    summed: tuple[str, ...]  # axes of inputs

    @property
    def expert(self) -> int | None:
        """Returns the index of the expert; None if the module has all experts or none."""
        return next(iter(self.piece.counted.values()), None)

    @property
    def fused(self) -> bool:
        """Returns True if the module holds all experts."""
        return self.expert is None and bool(self.experts)

    @property
    def key(self) -> tuple[str, int | None]:
        """Returns the pattern path and the layer index."""
        return self.short, self.piece.place.layer

    def size(self, axes: tuple[str, ...]) -> int:
        """Returns the length of the tensor's dimension that has `axes`."""
        return math.prod(self.lengths[a] for a in self.piece.groups[self.piece.dimension(axes)])

    def view(self, array: np.ndarray, axis: int, axes: tuple[str, ...]) -> np.ndarray:
        """Returns a view of this part of `array`, with the file's dimension `axis` split into the layer's `axes`."""
        return self.piece.in_axes(array, self.lengths, axis, axes)


@dataclass(frozen=True)
class Names:
    """Names of a model's weights in transformers."""

    parts: dict[str, list[Part]]  # by every adaptable module (or expert parameter)
    tensors: dict[str, Tensor]  # by name
    tables: set[str]  # modules that are embeddings or heads
    table: weights.Table
    family: str

    def in_table(self, name: str) -> str:
        """Returns the spelling of `name` in the table."""
        for entry in self.table:
            name = entry.applied(name) if isinstance(entry, weights.Renamed) else name
        return _current(name)

    def in_transformers(self, name: str) -> str:
        """Returns the name of a module in transformers, which for some models differs from that in files.

        A prefix that reading removes belongs to files with encoders; the class of the text alone has none.
        """
        for entry in self.table:
            if not isinstance(entry, weights.Renamed) or entry.hf_prefix.startswith(entry.to):
                continue
            if not entry.to.endswith(entry.hf_prefix):
                name = entry.hf_prefix + name.removeprefix(entry.to) if name.startswith(entry.to) else name
        return name

    def spellings(self, module: str) -> set[str]:
        """Returns the names of a module in files and in transformers; patterns may mean either."""
        return {module, self.in_transformers(module)}


def names_of(model: Any, *, fused: bool = False) -> Names:
    """Returns the names of a model's weights.

    Args:
        model: A model of a registered family, with adapters and quantized weights or without.
        fused: True names experts as transformers 5 holds them, in two parameters, where files have a tensor for each.
    """
    plain = jax.eval_shape(lambda model: quantization.full_precision(merge(model)), model)
    family = weights.family_of(model)
    table = with_fused_experts(family.table(model.cfg)) if fused else family.table(model.cfg)
    layers, short = dict(sites.find(plain, sites.SITES)), nn.tree.pattern_paths(plain)
    parts: dict[str, list[Part]] = {}
    tensors, tables = resolve(plain, table).tensors, set()
    for name, tensor in tensors.items():
        lengths = dict(zip([a for group in tensor.pieces[0].groups for a in group], tensor.lengths, strict=True))
        for piece in tensor.pieces:
            path = piece.place.path
            site = layers.get(path.removesuffix(".w"))
            # Skip modules in which heads of several layers alternate.
            if site is None or not path.endswith(".w") or piece.one_by_one:
                continue
            kinds = (tuple(piece.leaf_axes[d] for d in dims) for dims in sites.dimensions(site))
            part = Part(path[:-2], short[path][:-2], piece, lengths, *kinds)
            module = _current(name.removesuffix(".weight"))
            parts.setdefault(module, []).append(part)
            tables |= {module} if isinstance(site, nn.Embed) else set()
    return Names(parts, {_current(name): t for name, t in tensors.items()}, tables, table, family.name)


def _current(module: str) -> str:
    """Returns a module's name in transformers 5, where the families below have others in files; experts keep theirs."""
    for old, new in {} if ".experts." in module else CURRENT.items():
        module = module.replace(old, new)
    return module
