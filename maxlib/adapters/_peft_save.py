"""Saves adapters of models as PEFT directories."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from maxlib import nn
from maxlib.adapters import _peft_config as peft
from maxlib.adapters._apply import adapted, levels
from maxlib.adapters._peft_names import Names, Part, names_of
from maxlib.adapters._report import readers
from maxlib.adapters._saved_modules import is_saved, is_tied, untied
from maxlib.weights.export import whole_directory, write_json
from maxlib.weights.files import Header, write_file

# Families whose experts transformers stores as inputs x outputs and declares so; PEFT swaps those of others.
_TRANSPOSED = ("gpt_oss",)


@dataclass(frozen=True)
class _Factors:
    """Factors of one part of a module."""

    part: Part
    a: Any
    b: Any
    scale: float
    magnitude: Any  # None without DoRA


def save(
    model: Any,
    directory: str | Path,
    *,
    base: str | None = None,
    experts: Literal["each", "fused"] | None = None,
    dropout: float = 0.0,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Writes the adapters of `model` atomically as a PEFT directory, on one host.

    A fused matrix (gate and up, or queries, keys and values) whose parts have different first factors is written with
    the sum of their ranks. Modules that `load` wrote into the base are written as `modules_to_save`.

        tuned = adapters.add(model, adapters.LoRA(rank=8, alpha=16), rngs=nnx.Rngs(0))
        adapters.save(tuned, "adapter", base="org/name")  # PEFT opens it

    Args:
        model: A model with adapters, of a registered family.
        directory: Where to write.
        base: Name or directory of the base model, recorded as `base_model_name_or_path`.
        experts: "each" writes a module per expert, "fused" the parameters of transformers 5; None follows the published
            files of the family, where PEFT reads such adapters completely.
        dropout: Rate with which PEFT drops inputs of adapters if it trains them on, recorded as `lora_dropout`.
        overwrite: True replaces an existing directory.

    Returns:
        A line for each reader about what it reads, and what it would ignore, which also causes a warning.

    Raises:
        ValueError: when PEFT cannot express the adapters, or for a `dropout` outside of [0, 1).
        FileExistsError: when the directory exists and `overwrite` is False.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if not adapted(model):
        raise ValueError("the model has no adapters to save; add some with adapters.add")
    one_table = is_tied(model) and is_saved(model.embed.w)  # PEFT has a copy of it at the embedding and at the head
    shapes = jax.eval_shape(untied, model) if one_table else model
    names = names_of(shapes, fused=experts == "fused")
    if experts == "each" and any(parts[0].fused for parts in names.parts.values()):
        raise ValueError(f"{names.family} stores its experts in fused matrices, without modules: use experts=None")
    modules = _modules(model, names)
    if reason := _half_read(modules):
        if experts == "each":
            raise ValueError(f'{reason}: pass experts="fused", or adapt gate, up and down of all experts')
        names = names_of(shapes, fused=True)
        modules = _modules(model, names)
    modules = _with_common_scales(modules)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for name, factors in modules.items():
        ranks[names.in_transformers(name)], made = _written(name, factors, names, modules)
        tensors |= {peft.PREFIX + key: np.ascontiguousarray(value) for key, value in made.items()}
    fused = {n: r for n, r in ranks.items() if modules[names.in_table(n)][0].part.fused}
    single = {n: r for n, r in ranks.items() if n not in fused}
    each = [n for n in single if peft.fused_expert(n)]
    saved = _saved_modules(untied(model) if one_table else model, names)
    tensors |= {peft.PREFIX + name: value for name, value in saved.items()}
    dora, dense = _dora(modules), _dense_beside_experts(single, names)
    parameters = [] if dora else dense
    config = peft.make(
        single,
        experts=fused,
        modules=_targets(names, [name for name in single if name not in parameters], single),
        parameters=[f"{name}.weight" for name in parameters],
        saved=sorted({name.rpartition(".")[0] for name in saved}),
        tied=one_table,
        dora=dora,
        # PEFT doubles rank and alpha of gate and up when it joins them, which changes the scale with rsLoRA.
        rslora=not each and all(level.rslora for _, site in adapted(model) for level in levels(site)),
        dropout=dropout,
        base=base,
        task_type=_task_type(model),
    )
    headers = (Header(name, value.dtype, value.shape) for name, value in sorted(tensors.items()))
    headers = sorted(headers, key=lambda header: -header.dtype.itemsize)
    with whole_directory(directory, overwrite=overwrite) as part:
        write_json(part / peft.CONFIG, config)
        write_file(part / peft.TENSORS, headers, (tensors[header.name] for header in headers))
    kinds = {"dora": dora, "experts": bool(each or fused), "fused": bool(fused), "saved": bool(saved)}
    ignored = dense if dora else []
    lines = readers(ranks.values(), **kinds, beside=ignored)
    if ignored:
        warnings.warn(f"{directory}: {lines[0]}", stacklevel=2)
    return lines


def _task_type(model: Any) -> str:
    """Returns PEFT's name of what a model is for."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.ScoreHead):
        return "CAUSAL_LM"
    return "SEQ_CLS" if head.b is None else "TOKEN_CLS"


def _dense_beside_experts(modules: Iterable[str], names: Names) -> list[str]:
    """Returns the dense MLP modules of a model that also has experts.

    PEFT takes their names in `target_modules` for those of experts, but reads them as parameters, without DoRA.
    """
    if not any(part.experts for parts in names.parts.values() for part in parts):
        return []
    return [n for n in modules if n.endswith((".gate_proj", ".up_proj", ".down_proj")) and ".experts." not in n]


def _half_read(modules: Iterable[str]) -> str | None:
    """Returns why PEFT does not read all modules of single experts; None if it does.

    It joins gate and up, which needs both, and looks for the result below an adapter of down.
    """
    projections: dict[str, set[str]] = {}  # by layer
    for name in modules:
        if peft.fused_expert(name):
            projections.setdefault(name.partition(".experts.")[0], set()).add(name.rpartition(".")[2])
    gates = {layer: names & {"gate_proj", "up_proj", "w1", "w3"} for layer, names in projections.items()}
    if layers := [layer for layer, names in gates.items() if len(names) == 1]:
        return f"PEFT reads modules of single experts only with adapters of both gate and up, which {layers[0]} has not"
    has_down = any(names & {"down_proj", "w2"} for names in projections.values())
    if any(gates.values()) and not has_down:
        return "PEFT reads gate and up of single experts only beside adapters of down"
    return None


def _with_common_scales(modules: dict[str, list["_Factors"]]) -> dict[str, list["_Factors"]]:
    """Gives one scale to the modules of single experts that PEFT joins in a parameter, by changing `b`."""
    scales: dict[str, float] = {}
    new: dict[str, list[_Factors]] = {}
    for name, factors in modules.items():
        fused = peft.fused_expert(name)
        scale = factors[0].scale if fused is None else scales.setdefault(fused, factors[0].scale)
        new[name] = [
            dataclasses.replace(f, b=f.b * np.asarray(f.scale / scale, f.b.dtype), scale=scale) for f in factors
        ]
    return new


def _saved_modules(model: Any, names: Names) -> dict[str, np.ndarray]:
    """Returns the tensors of modules that `load` wrote into the base, by name."""
    marked = {path: v.get_value() for path, v in nn.variables(model).items() if is_saved(v)}
    host = {path: np.asarray(jax.device_get(value)) for path, value in marked.items()}
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in names.tensors.items():
        if not {piece.place.path for piece in tensor.pieces} <= host.keys():
            continue
        tensors[name] = np.empty(tensor.shape, host[tensor.pieces[0].place.path].dtype)
        for piece in tensor.pieces:
            cut = tuple(slice(0, n) for n in piece.place.shape)
            leaf = host[piece.place.path]
            value = leaf if piece.place.index is None else leaf[piece.place.index]
            piece.in_leaf_order(tensors[name], tensor.lengths, cut)[...] = value[piece.within(cut)]
    return {
        f"{names.in_transformers(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": x for name, x in tensors.items()
    }


def _modules(model: Any, names: Names) -> dict[str, list[_Factors]]:
    """Returns the factors of every adapted module."""
    sites = dict(adapted(model))
    factors_of: dict[str, list[_Factors]] = {}
    taken = set()
    joined = {path: _joined(path, site) for path, site in sites.items()}
    for name, parts in names.parts.items():
        for part in [part for part in parts if part.site in sites]:
            taken.add(part.site)
            arrays, scale = joined[part.site]
            index = tuple(i for i in (part.piece.place.index, part.expert) if i is not None)
            a, b, magnitude = (None if array is None else array[index] for array in arrays)
            factors_of.setdefault(name, []).append(_Factors(part, a, b, scale, magnitude))
    if lost := sorted(sites.keys() - taken):
        raise ValueError(f"{lost} have no name in transformers, so PEFT cannot express their adapters")
    return factors_of


def _joined(path: str, site: Any) -> tuple[list[Any], float]:
    """Returns `a`, `b` and magnitude of a layer, on the host, and their scale; several adapters become one."""
    adapters = levels(site)
    if len(adapters) > 1 and any(level.magnitude is not None for level in adapters):
        raise ValueError(f"{path}: PEFT cannot express DoRA on top of another adapter; merge the lower one first")

    def host(v):
        return np.asarray(jax.device_get(v.get_value()))

    scale, experts = adapters[0].scale, hasattr(site, "weight_order") and len(site.w.shape) > 2
    a = np.concatenate([host(level.a) for level in adapters], axis=int(nn.stack.layer_axis(site) is not None) + experts)
    b = np.concatenate([host(level.b) * np.asarray(level.scale / scale, level.b.dtype) for level in adapters], axis=-1)
    return [a, b, None if adapters[0].magnitude is None else host(adapters[0].magnitude)], scale


def _dora(modules: dict[str, list[_Factors]]) -> bool:
    """Returns True if all adapters are DoRA; raises ValueError if only some are."""
    kinds = {f.magnitude is not None for factors in modules.values() for f in factors}
    if len(kinds) > 1:
        raise ValueError("PEFT has one use_dora for all modules: give DoRA to all adapters or to none")
    return kinds.pop()


def _written(
    name: str, factors: Sequence[_Factors], names: Names, modules: dict[str, Any]
) -> tuple[tuple[int, float], dict[str, np.ndarray]]:
    """Returns rank and scale of a module, and its tensors by name."""
    part = factors[0].part
    lead = (factors[0].a.shape[0],) if part.fused else ()
    shared = all(np.array_equal(f.a, factors[0].a) for f in factors)
    rank = factors[0].b.shape[-1] if shared else sum(f.b.shape[-1] for f in factors)
    a = np.zeros((*lead, rank, part.size(part.summed)), factors[0].a.dtype)
    b = np.zeros((*lead, part.size(part.kept), rank), factors[0].b.dtype)
    start, scale = 0, factors[0].scale
    for f in factors:
        rows = slice(start, start + f.b.shape[-1])
        f.part.view(a[..., rows, :], len(lead) + 1, part.summed)[...] = f.a
        f.part.view(b, len(lead), part.kept)[..., rows] = f.b * np.asarray(f.scale / scale, f.b.dtype)
        start += 0 if shared else f.b.shape[-1]
    if part.fused and factors[0].magnitude is not None:
        raise ValueError(f"{name}: PEFT has no DoRA for fused experts")
    if part.fused:
        return (rank, scale), _fused(name, a, b, names, modules)
    made = {f"{names.in_transformers(name)}.lora_A.weight": a, f"{names.in_transformers(name)}.lora_B.weight": b}
    return (rank, scale), made | _magnitude(name, factors, names)


def _magnitude(name: str, factors: Sequence[_Factors], names: Names) -> dict[str, np.ndarray]:
    """Returns DoRA's magnitudes of a module's rows, if they are trained."""
    if factors[0].magnitude is None:
        return {}
    if len(factors) != len(names.parts[name]):
        raise ValueError(f"{name}: with DoRA either all parts of a fused matrix have adapters or none")
    part = factors[0].part
    magnitude = np.zeros(part.size(part.kept), factors[0].magnitude.dtype)
    for f in factors:
        f.part.view(magnitude, 0, part.kept)[...] = f.magnitude
    return {f"{names.in_transformers(name)}.lora_magnitude_vector": magnitude}


def _fused(name: str, a: np.ndarray, b: np.ndarray, names: Names, modules: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a parameter of all experts: A is expert-major, and in B the expert index is innermost."""
    part = names.parts[name][0]
    in_out = part.piece.dimension(part.summed) < part.piece.dimension(part.kept)
    if in_out and names.family not in _TRANSPOSED:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    stem, _, parameter = name.rpartition(".")
    inner = parameter != "down_proj" and f"{stem}.down_proj" in modules
    where = names.in_transformers(stem) + ".base_layer" * inner
    # [E, r, I] -> [E r, I]; [E, O, r] -> [O, r, E] -> [O, r E]
    a, b = a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return {f"{where}.lora_A.weight": a, f"{where}.lora_B.weight": b}


def _targets(names: Names, modules: Iterable[str], adapted: Iterable[str]) -> list[str]:
    """Returns `target_modules`: last names of `modules` if they only match adapted ones, else full names."""

    def last(name):
        return name.rpartition(".")[2]

    shared = {last(name) for name in {names.in_transformers(n) for n in names.parts} - {*adapted}}
    return sorted({name if last(name) in shared else last(name) for name in modules})
