"""Loads PEFT directories into models."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import nn, sharding
from maxlib.adapters import _peft_config as peft
from maxlib.adapters._apply import make, trainable
from maxlib.adapters._peft_names import Names, Part, names_of
from maxlib.adapters._rules import LoRA
from maxlib.nn import _sites as sites
from maxlib.weights import _buckets as buckets
from maxlib.weights._files import read_header

Model = TypeVar("Model")
_FACTOR = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?$")
_SWAPS_FROM = (0, 19, 1)  # from this version of PEFT on, inputs and outputs of `E out in` experts are not swapped
Factors = dict[str, np.ndarray]


@dataclass
class _Layer:
    """Adapter of one layer: its settings, and factors by index of the expert (None for all experts)."""

    lora: LoRA
    factors: dict[int | None, tuple[np.ndarray, ...]] = field(default_factory=dict)


def load(
    model: Model,
    directory: str | Path,
    *,
    into_base: bool = False,
    dtype: Any = jnp.float32,
    layout: sharding.Layout | None = None,
) -> Model:
    """Reads a PEFT directory and adds its adapters to `model`.

    The tensors determine what is adapted. Dropout is ignored, as in inference.

        adapters.save(tuned, "lora", base="org/name")
        again = adapters.load(model, "lora")

    Args:
        model: The base model.
        directory: Has adapter_config.json and adapter_model.safetensors; or its name in a bucket.
        into_base: True allows saved modules, and adapters of embeddings and heads, which are written into the weights;
            `base_model` does not remove them.
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
    (factors, rest), found = nn.partition(new, trainable), nn.variables(new)
    put = lambda path, value: jax.device_put(value, layout.sharding(path, found[path]))
    return nn.combine({path: put(path, value) for path, value in factors.items()}, rest)


def _fitted(model: Model, directory: Path, into_base: bool, dtype: Any) -> tuple[Model, dict]:
    """Returns the model with tables that were written into it, and its adapters by pattern path and layer."""
    config, names, fused = peft.read(directory), names_of(model), names_of(model, fused=True)
    modules, saved = _read(directory / peft.TENSORS, names)
    modules = _named(modules, fused, config)
    parts = fused.parts | names.parts
    if lost := [name for name in modules if name not in parts]:
        raise ValueError(f"{directory}: {lost[0]} is adapted, but the model has no such matrix")
    if unknown := [name for name in saved if name not in names.whole]:
        raise ValueError(f"{directory} has tensors without a counterpart in the model: {unknown[:10]}")
    tables = {name: factors for name, factors in modules.items() if name in names.tables}
    if (tables or saved) and not into_base:
        raise ValueError(
            f"{directory} replaces or adapts whole tables ({[*tables, *saved][:5]}), which have no adapter here: pass "
            "into_base=True to write them into the weights, from which `base_model` cannot remove them"
        )
    matrices = {name: (parts[name], factors) for name, factors in modules.items() if name not in tables}
    return _written(model, names, tables, saved, config, dtype), _collect(matrices, config, dtype)


def _read(path: Path, names: Names) -> tuple[dict[str, Factors], Factors]:
    """Returns the factors of every module, and all other tensors, by the table's spelling of their names."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must hold the adapter's tensors; pickled adapters are not read")
    modules: dict[str, Factors] = {}
    saved: Factors = {}
    for name, tensor in read_header(path).items():
        if not name.startswith(peft.PREFIX):
            raise ValueError(f"{path}: names must begin with {peft.PREFIX!r}, as PEFT writes them; got {name!r}")
        short = name.removeprefix(peft.PREFIX)
        if found := _FACTOR.match(short):
            modules.setdefault(names.in_table(found[1]), {})[found[2].removeprefix("embedding_")] = tensor.view()
        elif ".lora_" in short:
            raise ValueError(f"{path}: {name} belongs to a kind of adapter that is not supported")
        else:
            saved[names.in_table(short)] = tensor.view()
    if not (modules or saved):
        raise ValueError(f"{path} has no tensors, so the result would be the base model")
    for module, factors in modules.items():
        if not {"A", "B"} <= factors.keys() or factors["A"].ndim != 2 or factors["B"].ndim != 2:
            raise ValueError(f"{path}: {module} has only {sorted(factors)}; it needs lora_A and lora_B, both matrices")
    return modules, saved


def _named(modules: dict[str, Factors], fused: Names, config: peft.Config) -> dict[str, Factors]:
    """Names experts' parameters: in PEFT `experts.base_layer` is gate and up, `experts` is down or the only one."""
    renamed, last = {}, lambda name: name.rpartition(".")[2]
    named = {*map(last, config.fields.get("target_parameters") or ())}
    for name, factors in modules.items():
        stem = name.removesuffix(".base_layer").replace("block_sparse_moe", "mlp")
        own = {last(n) for n, parts in fused.parts.items() if n.rpartition(".")[0] == stem and parts[0].experts}
        if own and stem.endswith("experts"):
            inner = name.endswith(".base_layer")
            both = inner or f"{name}.base_layer" in modules
            wanted = {"gate_up_proj" if inner else "down_proj"} if both else named & own
            if len(wanted) != 1:
                raise ValueError(f"{config.where}: target_parameters must say which parameter of {stem} is adapted")
            name = f"{stem}.{wanted.pop()}"
        renamed[name] = factors
    return renamed


def _swapped(experts: Mapping[str, tuple[Part, Factors]], config: peft.Config) -> dict[str, bool]:
    """Returns whether inputs and outputs of experts' factors are swapped, as in files of PEFT before 0.19.1.

    For square matrices the other matrices of the file decide, or the version.
    """
    found: dict[str, bool | None] = {}
    for name, (part, factors) in experts.items():
        sizes, got = (part.size(part.summed), part.size(part.kept)), (factors["A"].shape[-1], factors["B"].shape[0])
        if got not in (sizes, sizes[::-1]):
            raise ValueError(f"{name}: factors must be for {sizes[0]} inputs and {sizes[1]} outputs, got {got}")
        found[name] = None if sizes[0] == sizes[1] else got != sizes
    votes = {vote for vote in found.values() if vote is not None}
    for name, (part, _) in experts.items():
        if found[name] is None and len(votes) != 1:
            kept, summed = map(part.piece.dimension, (part.kept, part.summed))
            if config.version is None or kept > summed:
                more = "; add peft_version to adapter_config.json" if config.version is None else ""
                raise ValueError(
                    f"{config.where}: {name} is square, and the file does not say whether A and B are swapped (PEFT "
                    f"before 0.19.1 swapped them){more}"
                )
            votes = {config.version < _SWAPS_FROM}
    return {name: votes.copy().pop() if swapped is None else swapped for name, swapped in found.items()}


def _collect(
    modules: Mapping[str, tuple[Sequence[Part], Factors]], config: peft.Config, dtype: Any
) -> dict[tuple[str, int | None], _Layer]:
    """Returns the adapters by pattern path and layer index."""
    swapped = _swapped({name: (parts[0], x) for name, (parts, x) in modules.items() if parts[0].fused}, config)
    layers: dict[tuple[str, int | None], _Layer] = {}
    for module, (parts, factors) in modules.items():
        lora = config.adapter(module, dtype)
        for part in parts:
            layer = layers.setdefault(part.key, _Layer(lora))
            if layer.lora != lora:
                raise ValueError(f"{module}: experts of a layer must have one rank and alpha, got {layer.lora}, {lora}")
            layer.factors[part.expert] = _ours(part, module, factors, lora, swapped.get(module, False))
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
    key_of = lambda path, number: first.get(path, (path, None)) if number is None else (path, number)
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


def _written(model: Any, names: Names, tables: Mapping, saved: Factors, config: peft.Config, dtype: Any) -> Any:
    """Returns the model with saved modules and adapters of tables written into its weights."""
    if not (tables or saved):
        return model
    values, new = nn.variables(model), {names.whole[name]: value for name, value in saved.items()}
    for module, factors in tables.items():
        path, lora = names.whole[f"{module}.weight"], config.adapter(module, dtype)
        if getattr(model, "head", None) is None and path == "embed.w":
            raise ValueError(f"{module} is adapted alone, but it is the model's head too: adapt neither or untie them")
        a, b = (np.asarray(factors[n], np.float32) for n in "AB")
        w = np.asarray(new.get(path, values[path].get_value()), np.float32)
        change = b @ a  # of a head; an embedding's is stored as (rank, vocab) and (dim, rank)
        new[path] = w + lora.scale * (change if change.shape == w.shape else change.T)
    for path, value in new.items():
        if value.shape != values[path].get_value().shape:
            raise ValueError(f"{path} must be {values[path].get_value().shape}, got {value.shape}")
    arrays, rest = nn.partition(model, lambda path, variable: True)
    cast = {path: jnp.asarray(value).astype(arrays[path].dtype) for path, value in new.items()}
    return nn.combine(arrays | cast, rest)
