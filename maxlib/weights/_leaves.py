"""Reads one leaf of a model, or a part of it, from the tensors that fill it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.weights.files import Stored, is_float
from maxlib.weights.mapping import Conversion, Cut, Piece, Tensor, WeightMapping

_ALIGNMENT = 64  # of a buffer that a CPU device can use without copying


class Leaf:
    """One leaf of the model and the tensors that fill it."""

    def __init__(
        self, path: str, shape: jax.ShapeDtypeStruct, plan: WeightMapping, stored: Mapping[str, Stored], dtype: Any
    ):
        self.path, self.shape, self._stored = path, shape.shape, stored
        self._pieces = [(p, plan.tensors[p.hf_name]) for p in plan.filling.get(path, ()) if isinstance(p, Piece)]
        self._conversions = [c for c in plan.filling.get(path, ()) if isinstance(c, Conversion)]
        self.dtype = self._dtype(shape.dtype, dtype)

    def _dtype(self, of_leaf: Any, wanted: Any) -> np.dtype:
        if not is_float(of_leaf):
            return np.dtype(of_leaf)
        if wanted is not None:
            return np.dtype(wanted)
        sources = [self._stored[p.hf_name].dtype for p, _ in self._pieces]
        sources += [c.entry.dtype or self._stored[c.hf_names[0]].dtype for c in self._conversions]
        return np.dtype(jnp.result_type(*sources))

    def read(self, cut: Cut) -> np.ndarray:
        """Reads the part `cut` of this leaf; every byte is read from its file into one buffer."""
        cut = tuple(slice(*s.indices(n)) for s, n in zip(cut, self.shape, strict=True))
        out = _aligned([s.stop - s.start for s in cut], self.dtype)
        for piece, tensor in self._pieces:
            if (target := _repeat(out, cut, piece.place.index)) is not None:
                self._fill(*target, piece, tensor)
        for conversion in self._conversions:
            if (target := _repeat(out, cut, conversion.place.index)) is not None:
                for part in _rows(*target) if conversion.entry.batch else [target]:
                    self._convert(*part, conversion)
        return out

    def _fill(self, out: np.ndarray, cut: Cut, piece: Piece, tensor: Tensor) -> None:
        if (within := piece.within(cut)) is None:
            return
        stored, target = self._stored[piece.hf_name], out[within]
        take = functools.partial(piece.in_leaf_order, lengths=tensor.lengths, cut=cut)
        if not stored.as_stored:
            assign(out, within, stored.part(take), piece.hf_name)
            return
        view = stored.view()
        value = take(view)
        if value.dtype == target.dtype and value.flags.c_contiguous and target.flags.c_contiguous:
            stored.read_into(target, value.ctypes.data - view.ctypes.data)
        else:
            assign(out, within, value, piece.hf_name)

    def _convert(self, out: np.ndarray, cut: Cut, conversion: Conversion) -> None:
        entry = conversion.entry
        value = entry.load(
            *[self._stored[name].part(lambda values: values[cut[: entry.batch]]) for name in conversion.hf_names]
        )
        wanted = tuple(s.stop - s.start for s in cut[: entry.batch]) + conversion.place.shape[entry.batch :]
        if value.shape != wanted:
            names = ", ".join(conversion.hf_names)
            raise ValueError(f"{names}: the conversion gave shape {value.shape}, but {conversion.place} needs {wanted}")
        rest = tuple(slice(None) for _ in cut[: entry.batch]) + cut[entry.batch :]
        assign(out, ..., value[rest], str(conversion.place))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _repeat(out: np.ndarray, cut: Cut, index: int | None) -> tuple[np.ndarray, Cut] | None:
    """Drops the repeat axis of `out` and `cut`, at `index` of it; None if that repeat is not in `cut`."""
    if index is None:
        return out, cut
    return (out[index - cut[0].start, ...], cut[1:]) if cut[0].start <= index < cut[0].stop else None


def _rows(out: np.ndarray, cut: Cut) -> Iterator[tuple[np.ndarray, Cut]]:
    """Yields `out` and `cut` for each index of the first axis, because a converted part needs memory in addition to
    `out`.
    """
    for n, index in enumerate(range(cut[0].start, cut[0].stop)):
        yield out[n : n + 1], (slice(index, index + 1), *cut[1:])


def assign(out: np.ndarray, where: Any, value: np.ndarray, name: str) -> None:
    """Copies with a cast. Raises ValueError if values overflow float16 or a float8."""
    with np.errstate(over="ignore"):
        out[where] = value
    is_small = out.dtype == np.float16 or (is_float(out.dtype) and out.dtype.itemsize == 1)
    if is_small and value.dtype != out.dtype and not np.isfinite(out[where]).all():
        raise ValueError(f"{name} has values that overflow {out.dtype}; use float32 or bfloat16.")
