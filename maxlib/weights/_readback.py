"""Checks before an export that reading it would give the same model."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from maxlib import nn
from maxlib._utils.text import ranges
from maxlib.ops import Mask, Rope
from maxlib.weights._table import Table
from maxlib.weights.mapping import resolve

# Settings of layers that choose an implementation, or that only training uses; files do not store them.
_FREE = ("implementation", "matmul", "capacity_factor", "gather_once")
_PLAIN = bool | int | float | str | None | Mask | Rope
_SHOWN = 5


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
            "save_pretrained writes plain weights, and this model has quantized ones: write it with "
            "maxlib.quantization.save(model, directory), which maxlib.quantization.load reads, or export the model from "
            "which it was made"
        )
    wanted = jax.eval_shape(lambda: build(model.cfg, rngs=nnx.Rngs(0)))
    here, configured = (_tensors(m, table) for m in (model, wanted))
    wrong = {name: f": {_shape(here, name)} here, {_shape(configured, name)} by the configuration"
             for name in sorted(here.keys() | configured.keys()) if here.get(name) != configured.get(name)}  # fmt: skip
    wrong = grouped(wrong or _other_settings(model, wanted))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"this model is not the {type(model).__name__} that its config.json would describe, and would be read as "
            f"another model: {'; '.join(wrong[:_SHOWN])}{more}. Give the model a family of its own (family=), or store it "
            "with checkpoint.Checkpointer"
        )


def _is_quantized(x: Any) -> bool:
    return isinstance(x, nn.quantized.QuantizedWeight)


def _tensors(model: Any, table: Table) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that a table makes from a model, by name."""
    plan = resolve(model, table)
    converted = {name: (*c.place.shape, n) for c in plan.conversions for n, name in enumerate(c.hf_names)}
    return {name: tensor.shape for name, tensor in plan.tensors.items()} | converted


def _shape(tensors: dict[str, tuple[int, ...]], name: str) -> str:
    return str(tensors[name]) if name in tensors else "absent"


def grouped(differences: dict[str, str]) -> list[str]:
    """Joins what differs alike in several layers or experts: `layers.0-31.mlp.act is ...`.

    Args:
        differences: From a name, such as `layers.0.mlp.act`, to how it differs.
    """
    rows = [(re.split(r"(?<=\.)(\d+)(?=\.)", name), how) for name, how in differences.items()]
    for place in (3, 1):  # of the number of an expert, then of the number of a layer
        alike: dict[Any, list[str]] = defaultdict(list)
        for parts, how in rows:
            alike[(*parts[:place],), (*parts[place + 1 :],), how] += parts[place : place + 1]
        rows = [([*before, *_in_ranges(numbers), *after], how) for (before, after, how), numbers in alike.items()]
    return ["".join(parts) + how for parts, how in rows]


def _in_ranges(numbers: list[str]) -> list[str]:
    return [", ".join(ranges(sorted(map(int, numbers))))] if numbers else []


def _other_settings(model: Any, wanted: Any) -> dict[str, str]:
    """Returns the settings of layers that differ, such as an activation."""
    here, configured = (dict(_settings(m)) for m in (model, wanted))
    return {name: f" is {here[name]} here, {configured[name]} by the configuration"
            for name in here if name in configured and here[name] != configured[name]}  # fmt: skip


def _settings(model: Any) -> Iterator[tuple[str, str]]:
    """Yields the settings of all modules as text; those of a stack's layers by index, independent of the grouping."""
    modules = list(nnx.iter_modules(model))
    stacks = {path: part for path, part in modules if isinstance(part, nn.Stack)}
    for path, part in modules:
        if not any(path[: len(stack)] == stack for stack in stacks):
            yield from _own(path, part)
    for path, stack in stacks.items():
        places = [stack.where(i)[0] for i in range(len(stack))]
        stored = {place: _of_layer(functools.reduce(_child, place.split("."), stack)) for place in set(places)}
        for i, place in enumerate(places):
            yield from ((".".join(map(str, (*path, i, name))), word) for name, word in stored[place])


def _of_layer(layer: Any) -> list[tuple[str, str]]:
    return [setting for path, part in nnx.iter_modules(layer) for setting in _own(path, part)]


def _child(part: Any, name: str) -> Any:
    return part[int(name)] if name.isdecimal() else getattr(part, name)


def _own(path: tuple[Any, ...], part: Any) -> Iterator[tuple[str, str]]:
    for name, value in vars(part).items():
        setting = isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, nnx.Module | nnx.Variable))
        if setting and name not in _FREE and not name.startswith("_"):
            yield ".".join(map(str, (*path, name))), _word(value)


def _word(value: Any) -> str:
    """Describes a setting so that two builds of a model give the same text."""
    if isinstance(value, functools.partial):
        named = [f"{name}={_word(argument)}" for name, argument in value.keywords.items()]
        return f"{_word(value.func)}({', '.join([*map(_word, value.args), *named])})"
    # Without its address, which differs for every object.
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
