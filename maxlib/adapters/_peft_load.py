"""Loads PEFT directories into models."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import nn, sharding
from maxlib.adapters import _peft_config as peft
from maxlib.adapters._apply import LoRA, make, trainable
from maxlib.adapters._peft_names import Names, Part, names_of
from maxlib.adapters._saved_modules import is_tied, tied, untied, with_saved
from maxlib.nn import sites
from maxlib.weights import buckets
from maxlib.weights.files import read_header

Model = TypeVar("Model")
_FACTOR = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?$")
_PAIRS = ("A", "B"), ("embedding_A", "embedding_B")
_SWAPS_FROM = (0, 19, 1)  # from this version of PEFT on, inputs and outputs of `E out in` experts are not swapped
Factors = dict[str, np.ndarray]


@dataclass
class _Layer:
    """Adapter of one layer: its settings, and factors by index of the expert (None for all experts)."""

    lora: LoRA
    factors: dict[int | None, tuple[np.ndarray, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    """Contents of a file: factors by module, and other tensors by name."""

    modules: dict[str, Factors]
    saved: Factors  # modules that are trained as a whole
    base: Factors  # weights of the base beside them


def load(
    model: Model,
    directory: str | Path,
    *,
    into_base: bool = False,
    dtype: Any = jnp.float32,
    layout: sharding.Layout | None = None,
) -> Model:
    """Reads a PEFT directory and adds its adapters to `model`.

    The tensors determine what is adapted. Dropout is ignored, as in inference (`lora_dropout`).

        adapters.save(tuned, "lora", base="org/name")
        again = adapters.load(model, "lora")

    Args:
        model: The base model.
        directory: Has adapter_config.json and adapter_model.safetensors; or its name in a bucket.
        into_base: True allows saved modules (`modules_to_save`) and adapters of embeddings and heads, which are written
            into the weights. Saved modules are trained as a whole, as in PEFT; adapters of tables are not. `save`
            writes both. A head that is tied to the embedding becomes a table of its own if PEFT has two.
        dtype: Dtype of the factors.
        layout: Placement of the factors over a mesh; None puts them on one device.

    Returns:
        The model with adapters.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when a field, a tensor or a shape does not fit the model; names it.
    """
    directory = buckets.local(directory)
    try:
        model, layers = _fitted(model, directory, into_base, dtype)
    except ValueError as error:
        if str(directory) in str(error):
            raise
        raise ValueError(f"{directory}: {error}") from error
    new = _put(model, layers)
    if layout is None:
        return new
    (factors, rest), variables = nn.partition(new, trainable), nn.variables(new)

    def put(path, value):
        return jax.device_put(value, layout.sharding(path, variables[path]))

    return nn.combine({path: put(path, value) for path, value in factors.items()}, rest)


def _fitted(model: Model, directory: Path, into_base: bool, dtype: Any) -> tuple[Model, dict]:
    """Returns the model with tables that were written into it, and its adapters by pattern path and layer."""
    config, shapes = peft.read(directory), jax.eval_shape(untied, model)
    names, fused = names_of(shapes), names_of(shapes, fused=True)
    file = _read(directory / peft.TENSORS, names, config)
    modules = _named(file.modules, fused, config)
    parts = fused.parts | names.parts
    if lost := [name for name in modules if name not in parts]:
        raise ValueError(f"{directory}: {lost[0]} is adapted, but the model has no such matrix")
    if unknown := [name for name in {**file.saved, **file.base} if name not in names.tensors]:
        raise ValueError(f"{directory} has tensors without a counterpart in the model: {unknown[:10]}")
    tables = {name: factors for name, factors in modules.items() if name in names.tables}
    if (tables or file.saved or file.base) and not into_base:
        raise ValueError(
            f"{directory} replaces or adapts whole tables ({[*tables, *file.saved, *file.base][:5]}), which have no "
            "adapter here: pass into_base=True to write them into the weights, from which `base_model` cannot remove them"
        )
    matrices = {name: (parts[name], factors) for name, factors in modules.items() if name not in tables}
    return _written(model, names, tables, file, config, dtype), _collect(matrices, names, config, dtype)


def _read(path: Path, names: Names, config: peft.Config) -> _File:
    """Reads a file by the table's spelling of its names."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must hold the adapter's tensors; pickled adapters are not read")
    file = _File({}, {}, {})
    for name, tensor in read_header(path).items():
        if not name.startswith(peft.PREFIX):
            raise ValueError(f"{path}: names must begin with {peft.PREFIX!r}, as PEFT writes them; got {name!r}")
        short = name.removeprefix(peft.PREFIX)
        if match := _FACTOR.match(short):
            file.modules.setdefault(names.in_table(match[1]), {})[match[2]] = tensor.view()
        elif ".lora_" in short:
            raise ValueError(f"{path}: {name} belongs to a kind of adapter that is not supported")
        elif config.saves(short.rpartition(".")[0]):
            file.saved[names.in_table(short)] = tensor.view()
        else:  # PEFT adds the base's embedding and head if they are adapted, or have new tokens
            file.base[names.in_table(short.replace(".base_layer.", "."))] = tensor.view()
    if not (file.modules or file.saved or file.base):
        raise ValueError(f"{path} has no tensors, so the result would be the base model")
    for module, factors in file.modules.items():
        pairs = [factors[n] for pair in _PAIRS if {*pair} <= factors.keys() for n in pair]
        if len(pairs) != 2 or any(factor.ndim != 2 for factor in pairs):
            raise ValueError(f"{path}: {module} has only {sorted(factors)}; it needs lora_A and lora_B, both matrices")
    return file


def _named(modules: dict[str, Factors], fused: Names, config: peft.Config) -> dict[str, Factors]:
    """Names experts' parameters: in PEFT `experts.base_layer` is (gate and) up, `experts` is down or the only one."""

    def last(name: str) -> str:
        return name.rpartition(".")[2]

    renamed = {}
    named = {last(name) for name in config.fields.get("target_parameters") or ()}
    for name, factors in modules.items():
        stem = name.removesuffix(".base_layer").replace("block_sparse_moe", "mlp")
        parameters = {last(n) for n, parts in fused.parts.items() if n.rpartition(".")[0] == stem and parts[0].experts}
        if parameters and stem.endswith("experts"):
            inner = name.endswith(".base_layer")
            both = inner or f"{name}.base_layer" in modules
            wanted = (parameters - {"down_proj"} if inner else {"down_proj"}) if both else named & parameters
            if len(wanted) != 1:
                raise ValueError(f"{config.where}: target_parameters must say which parameter of {stem} is adapted")
            name = f"{stem}.{wanted.pop()}"
        renamed[name] = factors
    return renamed


def _swapped(name: str, part: Part, factors: Factors, config: peft.Config) -> bool:
    """Returns whether inputs and outputs of experts' factors are swapped, as in files of PEFT before 0.19.1.

    For square matrices the version decides.
    """
    sizes, got = (part.size(part.summed), part.size(part.kept)), (factors["A"].shape[-1], factors["B"].shape[0])
    if got not in (sizes, sizes[::-1]):
        raise ValueError(f"{name}: factors must be for {sizes[0]} inputs and {sizes[1]} outputs, got {got}")
    if sizes[0] != sizes[1]:
        return got != sizes
    if config.version is None or part.piece.dimension(part.kept) > part.piece.dimension(part.summed):
        more = "; add peft_version to adapter_config.json" if config.version is None else ""
        raise ValueError(
            f"{config.where}: {name} is square, and the file does not say whether A and B are swapped (PEFT before 0.19.1 "
            f"swapped them){more}"
        )
    return config.version < _SWAPS_FROM


def _collect(
    modules: Mapping[str, tuple[Sequence[Part], Factors]], names: Names, config: peft.Config, dtype: Any
) -> dict[tuple[str, int | None], _Layer]:
    """Returns the adapters by pattern path and layer index."""
    layers: dict[tuple[str, int | None], _Layer] = {}
    for module, (parts, factors) in modules.items():
        lora = config.adapter(names.spellings(module), dtype)
        swapped = parts[0].fused and _swapped(module, parts[0], factors, config)
        for part in parts:
            layer = layers.setdefault(part.key, _Layer(lora))
            if layer.lora != lora:
                raise ValueError(f"{module}: experts of a layer must have one rank and alpha, got {layer.lora}, {lora}")
            layer.factors[part.expert] = _ours(part, module, factors, lora, swapped)
    return layers


def _ours(part: Part, module: str, factors: Factors, lora: LoRA, swapped: bool) -> tuple[np.ndarray, ...]:
    """Returns the model's factors for one part of a module."""
    a, b, rank = factors["A"], factors["B"], lora.rank
    count = int(np.prod([part.lengths[axis] for axis in part.experts])) if part.fused else 1
    if lora.dora != ("magnitude_vector" in factors):
        raise ValueError(f"{module}: use_dora and lora_magnitude_vector require each other")
    if a.shape[0] != rank * count or b.shape[1] != rank * count:
        raise ValueError(f"{module}: factors must have rank {rank} by r and rank_pattern, got {a.shape} and {b.shape}")
    if part.fused:  # A is expert-major; in B the index of experts runs fastest
        a, b = a.reshape(count, rank, -1), b.reshape(b.shape[0], rank, count).transpose(2, 0, 1)
        a, b = (b.swapaxes(1, 2), a.swapaxes(1, 2)) if swapped else (a, b)
    lead, wanted = int(part.fused), (part.size(part.summed), part.size(part.kept))
    if (got := (a.shape[-1], b.shape[lead])) != wanted:
        raise ValueError(f"{module}: factors are for {got[0]} inputs and {got[1]} outputs, must be {wanted}")
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    made = part.view(a, lead + 1, part.summed), part.view(b, lead, part.kept)
    return (*made, part.view(factors["magnitude_vector"].reshape(-1), 0, part.kept)) if lora.dora else made


def _put(model: Any, layers: dict[tuple[str, int | None], _Layer]) -> Any:
    """Adds the collected adapters to the model."""
    first = {key[0]: key for key in reversed(layers)}

    def key_of(path, number):
        return first.get(path, (path, None)) if number is None else (path, number)

    used = set()

    def decide(where: sites.Where) -> LoRA | None:
        layer = layers.get(key_of(where.path, where.layer))
        return None if layer is None else layer.lora

    def change(site: Any, lora: LoRA, path: str, numbers: tuple[int, ...] | None) -> Any:
        keys = [key_of(path, number) for number in numbers or (None,)]
        used.update(keys)
        each = [_stacked(layers[key], path, site) for key in keys if key in layers]
        arrays = [
            np.stack(values) if nn.stack.layer_axis(site) is not None else values[0]
            for values in zip(*each, strict=True)
        ]
        return make(site, path, lora, lambda _, *values: values, *(jnp.asarray(a, lora.dtype) for a in arrays))

    new = sites.change_sites(model, decide, change)
    if left := [key for key in layers if key not in used]:
        raise ValueError(f"the model has no layers for the adapters of {left[:10]}")
    return new


def _stacked(layer: _Layer, path: str, site: Any) -> tuple[np.ndarray, ...]:
    """Returns the factors of a layer, with an expert axis if each expert has its own module."""
    if None in layer.factors:
        return layer.factors[None]
    count = site.w.shape[-3]
    if missing := [e for e in range(count) if e not in layer.factors]:
        raise ValueError(f"{path}: all {count} experts must have adapters, there are none of {missing[:10]}")
    return tuple(np.stack(arrays) for arrays in zip(*(layer.factors[e] for e in range(count)), strict=True))


def _written(
    model: Any, names: Names, tables: Mapping[str, Factors], file: _File, config: peft.Config, dtype: Any
) -> Any:
    """Returns the model with saved modules and adapters of tables written into its weights."""
    path_of = {name: names.tensors[f"{name}.weight"].pieces[0].place.path for name in tables}
    saved = {piece.place.path for name in file.saved for piece in names.tensors[name].pieces}
    base = dict(file.base)
    if is_tied(model):  # new values of the base are those of both
        base |= {new: base[old] for old, new in _both(names) if old in base and new not in base}
    apart = untied(model)
    old = {path: variable.get_value() for path, variable in nn.variables(apart).items()}
    new = _filled(old, names, base)
    new |= _filled(old | new, names, file.saved)
    for module, factors in tables.items():
        if (path := path_of[module]) not in saved:  # PEFT does not use the adapter of a saved module
            w = np.asarray(new[path] if path in new else _stored(old, path, module), np.float32)
            new[path] = _adapted_table(w, module, factors, config.adapter(names.spellings(module), dtype))
    changed = {path: w for path, w in new.items() if path in saved or not np.array_equal(w, np.asarray(old[path]))}
    if not is_tied(model) or not changed.keys() & {"embed.w", "head.w"}:
        return with_saved(model, changed, saved.__contains__)
    embed, head = (np.asarray(changed.get(path, old[path]), np.float32) for path in ("embed.w", "head.w"))
    result = with_saved(apart, changed, saved.__contains__)
    one_copy = np.allclose(embed, head, rtol=1e-5, atol=1e-6) if config.ties else np.array_equal(embed, head)
    return tied(result) if one_copy and (config.ties or not saved & {"embed.w", "head.w"}) else result


def _both(names: Names) -> list[tuple[str, str]]:
    """Returns the names of the embedding and of the head, each beside the other."""
    places = {tensor.pieces[0].place.path: name for name, tensor in names.tensors.items()}
    embed, head = places["embed.w"], places["head.w"]
    return [(embed, head), (head, embed)]


def _filled(old: Mapping[str, Any], names: Names, tensors: Factors) -> dict[str, np.ndarray]:
    """Returns copies of the leaves that the tensors fill, by path."""
    new: dict[str, np.ndarray] = {}
    sizes = Counter[str]()
    for name, tensor in tensors.items():
        target = names.tensors[name]
        if tensor.shape != target.shape:
            raise ValueError(f"{name} must be {target.shape}, got {tensor.shape}")
        for piece in target.pieces:
            place = piece.place
            leaf = new.setdefault(place.path, np.array(_stored(old, place.path, name)))
            cut = tuple(slice(0, n) for n in place.shape)
            slot = leaf if place.index is None else leaf[place.index]
            slot[piece.within(cut)] = piece.in_leaf_order(tensor, target.lengths, cut)
            sizes[place.path] += piece.size
    if incomplete := [path for path, leaf in new.items() if sizes[path] != leaf.size]:
        raise ValueError(
            f"modules_to_save has some layers of {incomplete[0]}, which stores several layers and is trained as a whole: "
            "save the module of every layer, or of none"
        )
    return new


def _stored(old: Mapping[str, Any], path: str, name: str) -> Any:
    """Returns the array of a path; raises ValueError if it is quantized."""
    if path not in old:
        raise ValueError(f"{name} changes a quantized weight: load the adapter first, then quantize the model")
    return old[path]


def _adapted_table(w: np.ndarray, module: str, factors: Factors, lora: LoRA) -> np.ndarray:
    """Returns the table `w`, `V D`, with its adapter.

    DoRA's norms are those of the columns of an embedding, and of the rows of a head.
    """
    is_embedding = "embedding_A" in factors
    a, b = (np.asarray(factors[f"embedding_{n}" if is_embedding else n], np.float32) for n in "AB")
    if is_embedding:  # [r, V], [D, r] -> [r, D], [V, r]
        a, b = b.T, a.T
    if (shapes := (a.shape, b.shape)) != ((lora.rank, w.shape[1]), (w.shape[0], lora.rank)):
        raise ValueError(f"{module}: factors must have rank {lora.rank} and fit the table {w.shape}, got {shapes}")
    if lora.dora != ("magnitude_vector" in factors):
        raise ValueError(f"{module}: use_dora and lora_magnitude_vector require each other")
    new = w + lora.scale * (b @ a)
    if not lora.dora:
        return new
    axis = 0 if is_embedding else 1
    magnitude = np.expand_dims(np.asarray(factors["magnitude_vector"], np.float32).reshape(-1), axis)
    return magnitude * new / np.linalg.norm(new, axis=axis, keepdims=True)
