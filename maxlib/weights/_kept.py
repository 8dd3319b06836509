"""Weights that stay in the few bits in which the files have them: `nn.quantized.QuantizedWeight` from their factors.

All factors go through the model's weight table like plain tensors, scales and zero points repeated over the matrix. A
layer's weight is kept if its last dimension is a part of the inputs, and all of its tensors have one layout.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np

from maxlib import nn
from maxlib.nn import sites
from maxlib.weights._leaves import Leaf
from maxlib.weights._packed import Layout, Packed
from maxlib.weights.files import Stored, is_float
from maxlib.weights.mapping import Cut, Piece, WeightMapping

logger = logging.getLogger(__name__)
_RANGES = {"int4": (-8, 7), "int8": (-128, 127)}


def keep(
    abstract: Any, plan: WeightMapping, stored: Mapping[str, Stored], dtype: Any
) -> tuple[Any, dict[str, Callable[[Cut], np.ndarray]]]:
    """Replaces the weights of an abstract model that can stay quantized.

    Args:
        abstract: The model in full precision.
        plan: The mapping of its weights.
        stored: The tensors of the files.
        dtype: Dtype of dequantized weights; None for that of the files.

    Returns:
        The abstract model with quantized weights, and for each of their arrays, by path, a function that reads a part
        of it.
    """
    readers: dict[str, Callable[[Cut], np.ndarray]] = {}
    left = []

    def change(path: str, site: Any) -> Any:
        tensors = _tensors(plan, stored, f"{path}.w")
        packed = [tensor for tensor in tensors if isinstance(tensor, Packed)]
        layout = _common(packed, site) if packed and len(packed) == len(tensors) else None
        if layout is None or layout.qtype is None:
            left.extend([path] if any(map(_is_quantized, tensors)) else [])
            return site
        qtype = layout.qtype
        group = None if layout.group is None else math.gcd(layout.group, site.w.get_value().shape[-1])

        def quantized(layer: Any) -> Any:
            weight = nn.quantized.QuantizedWeight(
                layer.w[...].astype(dtype or packed[0].dtype),
                qtype=qtype,
                outputs=sites.outputs(layer),
                group=group,
                axes=sites.axes_of(layer),
                summed=layer.w.get_metadata().get("summed"),
                symmetric=not layout.has_zeros,
            )
            return sites.replace(layer, w=weight)

        new = nn.stack.map_layers(quantized, site)
        value = site.w.get_value()
        reader = _Reader(plan, stored, f"{path}.w", jax.ShapeDtypeStruct(value.shape, value.dtype), new.w)
        readers[f"{path}.w.values"] = reader.values
        for factor in ("scale", "zeros") if layout.has_zeros else ("scale",):
            readers[f"{path}.w.{factor}"] = functools.partial(reader.of_groups, factor)
        return new

    new = jax.eval_shape(lambda model: sites.map_sites(model, change), abstract)
    if left:
        logger.warning(
            "these quantized weights are read in full precision, because nn.quantized.QuantizedWeight has no such layout "
            "(groups in another order, blocks, or layers of a stack in different formats): %s",
            ", ".join(left),
        )
    return new, readers


def _tensors(plan: WeightMapping, stored: Mapping[str, Stored], path: str) -> list[Stored]:
    """Returns the tensors that fill a leaf."""
    uses = plan.filling.get(path, [])
    names = [name for use in uses for name in ([use.hf_name] if isinstance(use, Piece) else use.hf_names)]
    return [stored[name] for name in names]


def _is_quantized(tensor: Stored) -> bool:
    """Returns whether a tensor of a matrix has few bits in the files."""
    return not tensor.as_stored or not is_float(tensor.dtype)


def _common(packed: list[Packed], site: Any) -> Layout | None:
    """Returns the layout of a leaf; None if tensors differ in it, or groups are not along the last dimension."""
    layouts = {(tensor.layout.qtype, tensor.layout.group, tensor.layout.has_zeros) for tensor in packed}
    last_is_output = -1 in sites.dimensions(site)[1]
    if len(layouts) > 1 or (last_is_output and packed[0].layout.group is not None):
        return None
    return packed[0].layout


@dataclass(frozen=True)
class _Factor(Stored):
    """The "values", "scale" or "zeros" of a packed tensor, in the shape of the tensor."""

    as_stored: ClassVar[bool] = False
    packed: Packed
    factor: str

    def view(self) -> np.ndarray:
        factors, layout = self.packed.factors(), self.packed.layout
        if self.factor != "values":
            return np.broadcast_to(getattr(factors, self.factor), self.shape)
        values, qtype = factors.values if layout.has_zeros else factors.numbers, layout.qtype
        values = values if factors.codes is None else factors.codes
        low, high = _RANGES.get(qtype or "", (-math.inf, math.inf))
        if qtype in _RANGES and (values.min() < low or values.max() > high):
            raise ValueError(
                f"{self.packed.name} must have values of {qtype}, as its config.json says, got {values.min()} to "
                f"{values.max()}: read it without keep_quantized"
            )
        return values


class _Reader:
    """Reads the arrays of one quantized weight."""

    def __init__(self, plan: WeightMapping, stored: Mapping[str, Stored], path: str, plain: Any, w: Any):
        def leaf(factor: str, dtype: Any) -> Leaf:
            names = {use.hf_name for use in plan.filling[path] if isinstance(use, Piece)}
            tensors = {name: stored[name] for name in names}
            factors: dict[str, Stored] = {
                n: _Factor(t.path, t.offset, t.dtype, t.shape, t, factor)
                for n, t in tensors.items()
                if isinstance(t, Packed)
            }
            return Leaf(path, plain, plan, factors, dtype)

        self.path, self.shape, self.qtype = path, plain.shape, w.qtype
        self.scales = w.scale.get_value().shape
        dtype = {"int4": np.int8, "nf4": np.uint8}.get(w.qtype) or np.dtype(getattr(ml_dtypes, w.qtype, w.qtype))
        self._leaves = {
            "values": leaf("values", dtype),
            "scale": leaf("scale", np.float32),
            "zeros": leaf("zeros", np.int8),
        }

    def values(self, cut: Cut) -> np.ndarray:
        """Reads a part of the values as they are stored."""
        if self.qtype not in nn.quantized.FOUR_BITS:
            return self._leaves["values"].read(cut)
        start, stop, _ = cut[-1].indices(self.shape[-1] // 2)
        return nn.quantized.pack(self._leaves["values"].read((*cut[:-1], slice(2 * start, 2 * stop))))

    def of_groups(self, factor: str, cut: Cut) -> np.ndarray:
        """Reads a part of the scales or zero points, one index of the first dimension at a time if there are more than
        two.
        """
        first, *rest = (slice(*s.indices(n)) for s, n in zip(cut, self.scales, strict=True))
        if len(self.shape) < 3 or self.scales[0] != self.shape[0]:
            return self._reduced(factor, (first, *rest))
        rows = [self._reduced(factor, (slice(i, i + 1), *rest)) for i in range(first.start, first.stop)]
        return np.concatenate(rows)

    def _reduced(self, factor: str, cut: Cut) -> np.ndarray:
        """Reads the scales or zero points of a part of the matrix, and takes one for all values that share it."""
        sides = [size // count for size, count in zip(self.shape, self.scales, strict=True)]
        full = self._leaves[factor].read(tuple(slice(s.start * n, s.stop * n) for s, n in zip(cut, sides, strict=True)))
        # [A, B] -> [A / a, a, B / b, b]
        pairs = [(size // side, side) for size, side in zip(full.shape, sides, strict=True)]
        blocks = full.reshape([n for pair in pairs for n in pair])
        taken = blocks[tuple(slice(None) if n % 2 == 0 else slice(0, 1) for n in range(blocks.ndim))]
        if not (blocks == taken).all():
            raise ValueError(f"{self.path} must have one {factor} for each group: read it without keep_quantized")
        return taken.reshape([count for count, _ in pairs])
