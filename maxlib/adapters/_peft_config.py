"""PEFT's adapter_config.json: the fields that affect the result, and the adapter of each module."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object
from maxlib.adapters._rules import LoRA

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_HONOURED = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"}
# The tensors determine what is adapted and saved; the other fields only concern training, or how modules are found.
_WITHOUT_EFFECT = """auto_mapping base_model_name_or_path ensure_weight_tying exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform lora_dropout megatron_core modules_to_save peft_version
    qalora_group_size revision runtime_config target_modules target_parameters task_type"""
# Initializers that do not change the base weights.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Config:
    """A PEFT config, restricted to the fields that affect the result."""

    fields: Mapping[str, Any]
    where: Path  # the file, for errors

    def adapter(self, module: str, dtype: Any) -> LoRA:
        """Returns the adapter of a module, by the first matching pattern."""
        rank = _by_pattern(self.fields.get("rank_pattern"), module, self.fields["r"])
        alpha = _by_pattern(self.fields.get("alpha_pattern"), module, self.fields["lora_alpha"])
        flags = {"rslora": bool(self.fields.get("use_rslora")), "dora": bool(self.fields.get("use_dora"))}
        return LoRA(rank, alpha, **flags, dtype=dtype)

    @property
    def version(self) -> tuple[int, ...] | None:
        """Returns the version of PEFT that wrote the file; None if unknown."""
        found = re.match(r"(\d+)\.(\d+)\.?(\d*)", str(self.fields.get("peft_version") or ""))
        return None if found is None else tuple(int(part or 0) for part in found.groups())


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
    if (found := fields.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: peft_type must be 'LORA', got {found!r:.100}")
    if wrong := {name: fields.get(name) for name, is_right in _KINDS.items() if not is_right(fields.get(name))}:
        raise ValueError(
            f"{path}: r must be an integer, lora_alpha a number, patterns tables of them by regular expressions, "
            f"target_parameters names; the scale of the adapter depends on them. Got {wrong!r:.200}"
        )
    known = _HONOURED | {*_WITHOUT_EFFECT.split()}
    asks = lambda name, value: bool(value) and (name, value) != ("bias", "none")
    refused = {name: value for name, value in fields.items() if name not in known and asks(name, value)}
    if not isinstance(init := fields.get("init_lora_weights"), str | bool | None) or init not in _INITS:
        refused["init_lora_weights"] = init  # such initializers change the base
    if refused:
        raise ValueError(f"{path} has unsupported fields that affect the result: {refused}")
    return Config(fields, path)


_is_rank = lambda x: type(x) is int and 1 <= x <= 1 << 20
_is_alpha = lambda x: type(x) in (int, float) and abs(x) < 1e9  # a comparison with NaN is False


def _is_table(table: Any, of: Callable[[Any], bool]) -> bool:
    """Returns whether a value is None, or a table from regular expression to values of a kind."""
    try:
        return table is None or all(of(value) and re.compile(key) for key, value in table.items())
    except (AttributeError, re.error, RecursionError, OverflowError):  # not a table, or not an expression
        return False


_KINDS: dict[str, Callable[[Any], bool]] = {
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "rank_pattern": partial(_is_table, of=_is_rank),
    "alpha_pattern": partial(_is_table, of=_is_alpha),
    "target_parameters": lambda x: x is None or (isinstance(x, list) and all(isinstance(name, str) for name in x)),
}


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the module's path or its end."""
    fits = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, default)


def make(
    adapters: Mapping[str, tuple[int, float]], *, experts: Mapping[str, tuple[int, float]], dora: bool, base: str | None
) -> dict[str, Any]:
    """Returns the fields of a config from the rank and scale of modules, and of expert parameters, by name.

    Omitted fields have PEFT's defaults, which have no effect.
    """
    everything, counts = {**adapters, **experts}, Counter[tuple[int, float]]()
    for name, value in everything.items():  # a tensor per expert: PEFT takes their rank from `r`
        counts[value] += len(everything) if ".experts." in name and name in adapters else 1
    (rank, scale), _ = counts.most_common(1)[0]
    others: dict[str, tuple[int, float]] = {}
    for name, value in sorted(everything.items()):
        others |= _patterns(name, *value) if value != (rank, scale) else {}
    return {
        "alpha_pattern": {name: _alpha(*value) for name, value in others.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": _alpha(rank, scale),
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": "0.19.1",  # the first one that reads experts as they are written
        "r": rank,
        "rank_pattern": {name: value[0] for name, value in others.items()},
        "target_parameters": sorted({".".join(name.split(".")[-2:]) for name in experts}) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": dora,
        "use_rslora": False,
    }


def _patterns(name: str, rank: int, scale: float) -> dict[str, tuple[int, float]]:
    """Returns the patterns of a module; those of experts also for the fused parameter that PEFT makes of them."""
    found = re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)", name)
    if found is None:
        return {rf"{re.escape(name)}(\.weight)?": (rank, scale)}
    stem, down = re.escape(found[1]), found[2] in ("down_proj", "w2")
    fused = rf"{stem.replace('block_sparse_moe', 'mlp')}\.{'down_proj' if down else 'gate_up_proj'}"
    return {rf"{stem}\.\d+\.{found[2]}": (rank, scale), fused: (rank if down else 2 * rank, scale)}


def _alpha(rank: int, scale: float) -> int | float:
    """Returns the alpha that gives this scale, as an int if possible."""
    alpha = scale * rank
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
