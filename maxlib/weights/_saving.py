"""Writes a model to a Hugging Face directory, one tensor in memory at a time."""

import functools
import itertools
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from maxlib import nn, sharding
from maxlib.weights._buckets import is_bucket, whole_in_bucket
from maxlib.weights._files import OWN_FILES, Header, is_float, shard, write_file, write_index
from maxlib.weights._loading import assign, uncovered
from maxlib.weights._resolve import Conversion, Tensor, WeightMapping, resolve
from maxlib.weights._table import Table

MAX_SHARD_BYTES = 5 * 10**9
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


@contextmanager
def whole_directory(directory: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary directory that becomes `directory` at the end, or is removed after an error.

    In a bucket, the configuration is written last, so that nothing reads an incomplete directory.

    Raises FileExistsError if the directory is not empty, unless it is an export and `overwrite` is given.
    """
    if is_bucket(directory):
        check = functools.partial(_check_names, str(directory), overwrite=overwrite)
        with whole_in_bucket(str(directory), check) as part:
            yield part
        return
    directory = Path(directory).absolute()
    _check_free(directory, overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    part, old = (directory.with_name(f".{directory.name}.{what}-{mark}") for what in ("part", "old"))
    try:
        part.mkdir()
        yield part
        if directory.exists():
            directory.rename(old)
        part.rename(directory)
    except BaseException as error:
        if old.exists():
            old.rename(directory)
        error.add_note(f"Nothing was saved in {directory}; its previous contents are unchanged.")
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _check_free(directory: Path, overwrite: bool) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise FileExistsError(f"{directory} must be a directory or absent, but it is a file or a link.")
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    _check_names(str(directory), names, overwrite)


def _check_names(directory: str, names: list[str], overwrite: bool) -> None:
    foreign = [path.name for path in map(Path, names) if not any(path.match(pattern) for pattern in OWN_FILES)]
    if foreign:
        raise FileExistsError(
            f"{directory} has files that do not belong to an export ({', '.join(foreign[:5])}), and saving replaces "
            "the whole directory. Save elsewhere, or move them away."
        )
    if names and not overwrite:
        raise FileExistsError(f"{directory} already has an export. Save elsewhere, or pass overwrite=True.")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
