"""Writes a model to a Hugging Face directory, one tensor in memory at a time, and checks first that reading it would
give the same model.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from maxlib import nn, sharding
from maxlib.ops import Mask, Rope
from maxlib.weights._leaves import assign
from maxlib.weights._loading import uncovered
from maxlib.weights._table import Constant, Table
from maxlib.weights.files import MAX_SHARD_BYTES, Header, is_float, shard, write_file, write_index
from maxlib.weights.mapping import Conversion, Tensor, WeightMapping, resolve

_CACHED = 4  # parameters; several of the files' tensors may be sliced from each
# Settings of layers that choose an implementation, or that only training uses; files do not store them.
_FREE = ("implementation", "matmul", "gather_once")
_PLAIN = bool | int | float | str | None | Mask | Rope
_SHOWN = 5


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
    source = Source(model, table, dtype)
    return write_tensors(source.headers(), source.tensor, directory, max_shard_bytes)


def write_tensors(
    headers: Sequence[Header], tensor: Callable[[str], np.ndarray], directory: Path, max_shard_bytes: int
) -> np.dtype:
    """Writes tensors to files of at most `max_shard_bytes`; returns the dtype of most of the bytes."""
    files = shard(headers, max_shard_bytes)
    tensors = (tensor(header.name) for members in files.values() for header in members)
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


def take_array(path: str, value: Any, index: int | None) -> Any:
    """Returns a leaf, or an index of its first axis.

    Of an array on one CPU a view, as numpy reads its memory. Elsewhere a new array: an array caches its numpy value, so
    the whole model would accumulate in host memory.
    """
    if isinstance(value, jax.Array) and value.is_fully_addressable and [d.platform for d in value.devices()] == ["cpu"]:
        view = np.asarray(value)
        return view if index is None else view[index]
    return jnp.copy(value) if index is None else sharding.memory.to_device(value)[index]


class Source:
    """The files' tensors, made from the model's leaves on demand.

    Args:
        model: The model, or its `jax.eval_shape` if `take` needs only paths.
        table: Its weight table.
        dtype: The dtype of the floating tensors; None keeps that of the leaves.
        take: Function of a leaf's path, its value and an index of its first axis, None for all; returns an array.
    """

    def __init__(self, model: Any, table: Table, dtype: Any, take: Callable[[str, Any, int | None], Any] = take_array):
        plan = resolve(model, table)
        plan = WeightMapping(plan.pieces, [c for c in plan.conversions if c.entry.save is not None], plan.absent)
        if any(".matmul." in path and isinstance(v, nnx.LoRAParam) for path, v in nn.variables(model).items()):
            raise ValueError(
                "the model has adapters: adapters.merge writes them into its weights, adapters.base_model removes them"
            )
        if gaps := uncovered(model, plan):
            raise ValueError("the model's table has no entry that can write " + ", ".join(gaps))
        self.plan, self._take, self._dtype = plan, take, None if dtype is None else np.dtype(dtype)
        variables = nn.variables(model)
        self._values = {path: v.get_value() for path, v in variables.items()}
        self._expert_biases = {path for path, v in variables.items() if isinstance(v, nn.router.ExpertBias)}
        self._constants = {entry.hf_name: entry.value for entry in table if isinstance(entry, Constant)}
        self._converted = {name: (c, n) for c in plan.conversions for n, name in enumerate(c.hf_names)}
        self._shapes: dict[Any, list[tuple[tuple[int, ...], np.dtype]]] = {}
        self._leaf = functools.lru_cache(maxsize=_CACHED)(self._fetch)

    def headers(self) -> list[Header]:
        pieces = [Header(t.name, self._tensor_dtype(t), t.shape) for t in self.plan.tensors.values()]
        pieces += [Header(name, value.dtype, value.shape) for name, value in self._constants.items()]
        return pieces + [self._converted_header(name) for name in self._converted]

    def _tensor_dtype(self, tensor: Tensor) -> np.dtype:
        dtypes = [self._values[piece.place.path].dtype for piece in tensor.pieces]
        common = np.dtype(jnp.result_type(*dtypes))
        is_kept = not is_float(common) or tensor.pieces[0].place.path in self._expert_biases
        return common if self._dtype is None or is_kept else self._dtype

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
        if name in self._constants:
            return self._constants[name]
        if name in self._converted:
            conversion, n = self._converted[name]
            return _save(conversion, self._leaf(conversion.place.path, conversion.place.index))[n]
        tensor = self.plan.tensors[name]
        out = np.empty(tensor.shape, self._tensor_dtype(tensor))
        for piece in tensor.pieces:
            everything = tuple(slice(0, n) for n in piece.place.shape)
            value = self._leaf(piece.place.path, piece.place.index)[piece.within(everything)]
            assign(piece.in_leaf_order(out, tensor.lengths, everything), ..., value, name)
        return out

    def _fetch(self, path: str, index: int | None) -> np.ndarray:
        value = self._take(path, self._values[path], index)
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


def check_reads_back(model: Any, build: Callable[..., Any], table: Table) -> None:
    """Checks that a model matches its configuration.

    Args:
        model: A model with `cfg`, whose parts may have been swapped.
        build: `build(cfg, *, rngs)`, as called when reading.
        table: Its weight table.

    Raises:
        ValueError: For quantized weights, and when reading would miss tensors, find unused ones, or compute with other
            settings.
    """
    if any(map(_is_quantized, jax.tree.leaves(model, is_leaf=_is_quantized))):
        raise ValueError(
            'this model has quantized weights: pass quantized="compressed-tensors" to save_pretrained, for int4, int8 and '
            "FP8 weights that transformers and vLLM read; or write it with maxlib.quantization.save(model, directory), which "
            "keeps every format, for maxlib alone; or pass quantization.full_precision(model) to write plain weights"
        )
    wanted = jax.eval_shape(lambda: build(model.cfg, rngs=nnx.Rngs(0)))
    here, configured = _tensors(model, table), _tensors(wanted, table)
    wrong = _differences({*here, *configured}, here, configured)
    if not wrong:
        here, configured = _settings(model), _settings(wanted)
        wrong = _differences({*here} & {*configured}, here, configured)  # adapters have settings of their own
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"this model is not the {type(model).__name__} that its config.json would describe, and would be read as "
            f"another model: {'; '.join(wrong[:_SHOWN])}{more}. Give the model a family of its own (family=), or store it "
            "with checkpoint.Checkpointer"
        )


def _is_quantized(x: Any) -> bool:
    return isinstance(x, nn.quantized.QuantizedWeight)


def _differences(names: Iterable[str], here: Mapping[str, str], configured: Mapping[str, str]) -> list[str]:
    """Lists which of `names` differ between the model and the one that its configuration describes."""
    return [
        f"{name} is {here.get(name, 'absent')} here, {configured.get(name, 'absent')} by the configuration"
        for name in sorted(names)
        if here.get(name) != configured.get(name)
    ]


def _tensors(model: Any, table: Table) -> dict[str, str]:
    """Returns the shapes of the tensors that a table makes from a model, by name."""
    plan = resolve(model, table)
    converted = {name: f"{c.place.shape}, {n}" for c in plan.conversions for n, name in enumerate(c.hf_names)}
    return {name: str(tensor.shape) for name, tensor in plan.tensors.items()} | converted


def _settings(model: Any) -> dict[str, str]:
    """Returns the settings of all modules, such as an activation, as text; each layer of a stack has its own."""
    settings = {}
    for path, module in nnx.iter_modules(jax.eval_shape(nn.unstack, model)):
        for name, value in vars(module).items():
            is_function = callable(value) and not isinstance(value, nnx.Module | nnx.Variable)
            if (isinstance(value, _PLAIN) or is_function) and name not in _FREE and not name.startswith("_"):
                settings[".".join(map(str, (*path, name)))] = _word(value)
    return settings


def _word(value: Any) -> str:
    """Describes a setting so that two builds of a model give the same text."""
    if isinstance(value, functools.partial):
        named = [f"{name}={_word(argument)}" for name, argument in value.keywords.items()]
        return f"{_word(value.func)}({', '.join([*map(_word, value.args), *named])})"
    # Without its address, which differs for every object.
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
