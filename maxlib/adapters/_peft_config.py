"""PEFT's adapter_config.json: the fields that affect the result, and the adapter of each module."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object
from maxlib.adapters._apply import LoRA

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_HONOURED = """alpha_pattern ensure_weight_tying lora_alpha modules_to_save peft_type r rank_pattern use_dora
    use_rslora"""
# The tensors determine what is adapted; the other fields only concern training, or how modules are found.
_WITHOUT_EFFECT = """auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform lora_dropout megatron_core peft_version qalora_group_size
    revision runtime_config target_modules target_parameters task_type"""
# Initializers that do not change the base weights.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Config:
    """A PEFT config, restricted to the fields that affect the result."""

    fields: Mapping[str, Any]
    where: Path  # the file, for errors

    def adapter(self, spellings: Collection[str], dtype: Any) -> LoRA:
        """Returns the adapter of a module, by the first pattern that matches one of the spellings of its name."""
        rank = _by_pattern(self.fields.get("rank_pattern"), spellings, self.fields["r"])
        alpha = _by_pattern(self.fields.get("alpha_pattern"), spellings, self.fields["lora_alpha"])
        flags = {"rslora": bool(self.fields.get("use_rslora")), "dora": bool(self.fields.get("use_dora"))}
        return LoRA(rank, alpha, **flags, dtype=dtype)

    def saves(self, module: str) -> bool:
        """Returns True for a module that PEFT copies and trains as a whole, alone or in one that contains it."""
        parts, names = module.split("."), tuple(self.fields.get("modules_to_save") or ())
        return any(".".join(parts[:n]).endswith(names) for n in range(1, len(parts) + 1))

    @property
    def ties(self) -> bool:
        """Returns True if the embedding and the head have one adapter or one copy where the base has one table."""
        return bool(self.fields.get("ensure_weight_tying"))

    @property
    def version(self) -> tuple[int, ...] | None:
        """Returns the version of PEFT that wrote the file; None if unknown."""
        match = re.match(r"(\d+)\.(\d+)\.?(\d*)", str(self.fields.get("peft_version") or ""))
        return None if match is None else tuple(int(part or 0) for part in match.groups())


def read(directory: Path) -> Config:
    """Reads the config of a PEFT directory.

    Raises:
        FileNotFoundError: when it is not there.
        ValueError: when a field is missing, or has an unsupported effect on the result.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} must describe the adapter, as PEFT writes it, but does not exist")
    fields = read_json_object(path)
    if (peft_type := fields.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: peft_type must be 'LORA', got {peft_type!r:.100}")
    if wrong := {name: fields.get(name) for name, is_right in _KINDS.items() if not is_right(fields.get(name))}:
        raise ValueError(
            f"{path}: r must be an integer, lora_alpha a number, patterns tables of them by regular expressions, "
            f"target_parameters and modules_to_save names; the scale of the adapter depends on them. Got {wrong!r:.200}"
        )
    known = {*_HONOURED.split(), *_WITHOUT_EFFECT.split()}

    def asks(name, value):
        return bool(value) and (name, value) != ("bias", "none")

    refused = {name: value for name, value in fields.items() if name not in known and asks(name, value)}
    if not isinstance(init := fields.get("init_lora_weights"), str | bool | None) or init not in _INITS:
        refused["init_lora_weights"] = init  # such initializers change the base
    if refused:
        raise ValueError(f"{path} has unsupported fields that affect the result: {refused}")
    return Config(fields, path)


def lora_dropout(directory: str | Path) -> float:
    """Returns the `lora_dropout` of a PEFT directory, for `make_train_step(..., dropout={"lora_input": rate})`.

    Raises:
        ValueError: when it is not in `[0, 1)`, and as `load` does.
    """
    config = read(Path(directory))
    rate = config.fields.get("lora_dropout") or 0.0
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise ValueError(f"{config.where}: lora_dropout must be at least 0 and below 1, got {rate!r:.40}")
    return float(rate)


def _is_rank(x):
    return type(x) is int and 1 <= x <= 1 << 20


def _is_alpha(x):
    return type(x) in (int, float) and abs(x) < 1e9  # a comparison with NaN is False


def _is_table(table: Any, of: Callable[[Any], bool]) -> bool:
    """Returns whether a value is None, or a table from regular expression to values of a kind."""
    try:
        return table is None or all(of(value) and re.compile(key) for key, value in table.items())
    except (AttributeError, re.error, RecursionError, OverflowError):  # not a table, or not an expression
        return False


def _is_names(names: Any) -> bool:
    """Returns whether a value is None or a list of names."""
    return names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "rank_pattern": partial(_is_table, of=_is_rank),
    "alpha_pattern": partial(_is_table, of=_is_alpha),
    "target_parameters": _is_names,
    "modules_to_save": _is_names,
}


def _by_pattern(patterns: Mapping[str, Any] | None, spellings: Collection[str], default: Any) -> Any:
    """Returns the value of the first pattern that matches a spelling of the module's path, or its end."""

    def matches(key: str) -> bool:
        return any(re.match(rf"(.*\.)?({key})$", module) for module in spellings)

    return next((value for key, value in (patterns or {}).items() if matches(key)), default)


def make(
    adapters: Mapping[str, tuple[int, float]],
    *,
    experts: Mapping[str, tuple[int, float]],
    modules: Sequence[str],
    parameters: Sequence[str],
    saved: Sequence[str],
    tied: bool,
    dora: bool,
    rslora: bool,
    dropout: float,
    base: str | None,
    task_type: str,
) -> dict[str, Any]:
    """Returns the fields of a config. Omitted fields have PEFT's defaults, which have no effect.

    Args:
        adapters: Rank and scale by name of the module.
        experts: Those of experts' parameters.
        modules: `target_modules`.
        parameters: `target_parameters` besides those of experts.
        saved: `modules_to_save`.
        tied: True if one table is saved as the embedding and as the head.
        dora: `use_dora`.
        rslora: `use_rslora`.
        dropout: `lora_dropout`.
        base: Name of the base model.
        task_type: PEFT's name of what the model is for.
    """
    everything, counts = {**adapters, **experts}, Counter[tuple[int, float]]()
    each = {name: _EXPERT.fullmatch(name) for name in adapters}
    for name, value in everything.items():  # a tensor per expert: PEFT takes their rank from `r`
        counts[value] += len(everything) if each.get(name) else 1
    (rank, scale), _ = counts.most_common(1)[0]
    patterns = {
        rf"{re.escape(name)}(\.weight)?": value
        for name, value in sorted(everything.items())
        if value != (rank, scale) and not each.get(name)
    }
    for name, match in sorted(each.items()):
        if match is not None and adapters[name] != (rank, scale):
            patterns[rf"{re.escape(match[1])}\.\d+\.{match[2]}"] = adapters[name]
    for name, (fused_rank, fused_scale) in _fused_experts(adapters).items():
        if (fused_rank, fused_scale) != ((1 if name.endswith("down_proj") else 2) * rank, scale):
            patterns[re.escape(name)] = fused_rank, fused_scale
    return {
        "alpha_pattern": {name: _alpha(*value, rslora=rslora) for name, value in patterns.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        "ensure_weight_tying": tied,
        "inference_mode": True,
        "lora_alpha": _alpha(rank, scale, rslora=rslora),
        "lora_dropout": dropout,
        "modules_to_save": [*saved] or None,
        "peft_type": "LORA",
        "peft_version": "0.19.1",  # the first one that reads experts as they are written
        "r": rank,
        "rank_pattern": {name: value[0] for name, value in patterns.items()},
        "target_modules": [*modules],
        "target_parameters": sorted({*parameters, *(".".join(name.split(".")[-2:]) for name in experts)}) or None,
        "task_type": task_type,
        "use_dora": dora,
        "use_rslora": rslora,
    }


def fused_expert(name: str) -> str | None:
    """Returns the parameter in which PEFT puts a module of one expert; None for other modules."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    stem = match[1].replace("block_sparse_moe", "mlp")
    return f"{stem}.{'down_proj' if match[2] in ('down_proj', 'w2') else 'gate_up_proj'}"


def _fused_experts(adapters: Mapping[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
    """Returns the rank and scale of the parameters that PEFT makes of a module per expert.

    Gate and up are joined: their ranks are added, and the scale must be the same.
    """
    ranks: dict[str, dict[str, int]] = {}
    scales: dict[str, float] = {}
    for name, (rank, scale) in adapters.items():
        if (fused := fused_expert(name)) is not None:
            ranks.setdefault(fused, {})[name.rpartition(".")[2]] = rank
            scales[fused] = scale
    return {name: (sum(projections.values()), scales[name]) for name, projections in ranks.items()}


def _alpha(rank: int, scale: float, *, rslora: bool) -> int | float:
    """Returns the alpha that gives this scale, as an int if possible."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
