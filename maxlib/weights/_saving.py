"""Writes a model to a Hugging Face directory, one tensor in memory at a time."""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from maxlib import nn, sharding
from maxlib.weights._loading import assign, uncovered
from maxlib.weights._table import Table
from maxlib.weights.files import MAX_SHARD_BYTES, Header, is_float, shard, write_file, write_index
from maxlib.weights.mapping import Conversion, Tensor, WeightMapping, resolve

_CACHED = 4  # parameters; several of the files' tensors may be sliced from each


def write_weights(
    model: Any, table: Table, directory: Path, *, dtype: Any = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> np.dtype:
    """Writes the safetensors of `model`, with an index if there are several files.

    Args:
        model: The model; with several hosts all must call this, and the first one writes.
        table: The model's weight table.
        directory: An existing, empty directory.
        dtype: The dtype of the floating weights; None keeps theirs.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Returns:
        The dtype of most of the bytes.

    Raises:
        ValueError: For a weight that the table cannot write.
    """
    source = _Source(model, table, dtype)
    headers = source.headers()
    files = shard(headers, max_shard_bytes)
    tensors = (source.tensor(header.name) for members in files.values() for header in members)
    try:
        for name, members in files.items() if jax.process_index() == 0 else ():
            write_file(directory / name, members, itertools.islice(tensors, len(members)))
    finally:  # all hosts take part in gathers, even if the writing host's disk is full
        for _ in tensors if jax.process_count() > 1 else ():
            pass
    if len(files) > 1 and jax.process_index() == 0:
        write_index(directory, files)
    sizes = {d: sum(h.nbytes for h in headers if h.dtype == d) for d in {h.dtype for h in headers}}
    return max(sizes, key=lambda d: sizes[d])


class _Source:
    """The files' tensors, made from the model's leaves on demand."""

    def __init__(self, model: Any, table: Table, dtype: Any):
        plan = resolve(model, table)
        plan = WeightMapping(plan.pieces, [c for c in plan.conversions if c.entry.save is not None], plan.absent)
        if any(".matmul." in path and isinstance(v, nnx.LoRAParam) for path, v in nn.variables(model).items()):
            raise ValueError(
                "the model has adapters: adapters.merge writes them into its weights, adapters.base_model removes them"
            )
        if gaps := uncovered(model, plan):
            raise ValueError("the model's table has no entry that can write " + ", ".join(gaps))
        self._plan, self._dtype = plan, None if dtype is None else np.dtype(dtype)
        self._values = {path: v.get_value() for path, v in nn.variables(model).items()}
        self._converted = {name: (c, n) for c in plan.conversions for n, name in enumerate(c.hf_names)}
        self._shapes: dict[Any, list[tuple[tuple[int, ...], np.dtype]]] = {}
        self._leaf = functools.lru_cache(maxsize=_CACHED)(self._fetch)

    def headers(self) -> list[Header]:
        pieces = [Header(t.name, self._tensor_dtype(t), t.shape) for t in self._plan.tensors.values()]
        return pieces + [self._converted_header(name) for name in self._converted]

    def _tensor_dtype(self, tensor: Tensor) -> np.dtype:
        dtypes = [self._values[piece.place.path].dtype for piece in tensor.pieces]
        common = np.dtype(jnp.result_type(*dtypes))
        return common if self._dtype is None or not is_float(common) else self._dtype

    def _converted_header(self, name: str) -> Header:
        """Finds shape and dtype by converting zeros, once for layers of equal structure."""
        conversion, n = self._converted[name]
        dtype = np.dtype(self._values[conversion.place.path].dtype)
        key = (id(conversion.entry), conversion.place.shape)
        if key not in self._shapes:
            trial = _save(conversion, np.zeros(conversion.place.shape, dtype))
            self._shapes[key] = [(part.shape, part.dtype) for part in trial]
        shape, dtype = self._shapes[key][n]
        return Header(name, dtype, shape)

    def tensor(self, name: str) -> np.ndarray:
        if name in self._converted:
            conversion, n = self._converted[name]
            return _save(conversion, self._leaf(conversion.place.path, conversion.place.index))[n]
        tensor = self._plan.tensors[name]
        out = np.empty(tensor.shape, self._tensor_dtype(tensor))
        for piece in tensor.pieces:
            everything = tuple(slice(0, n) for n in piece.place.shape)
            value = self._leaf(piece.place.path, piece.place.index)[piece.within(everything)]
            assign(piece.in_leaf_order(out, tensor.lengths, everything), ..., value, name)
        return out

    def _fetch(self, path: str, index: int | None) -> np.ndarray:
        value = self._values[path]
        # Always a new array: an array caches its numpy value, so the whole model would accumulate in host memory.
        value = jnp.copy(value) if index is None else sharding.memory.to_device(value)[index]
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        return np.asarray(value)


def _save(conversion: Conversion, value: np.ndarray) -> tuple[np.ndarray, ...]:
    assert conversion.entry.save is not None
    parts = conversion.entry.save(value)
    if len(parts) != len(conversion.hf_names):
        raise ValueError(
            f"{conversion.hf_names}: `save` must give {len(conversion.hf_names)} tensors, gave {len(parts)}"
        )
    return parts
