"""Checks before an export that reading it would give the same model."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from maxlib import nn
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
    wrong = _differences(_tensors(model, table), _tensors(wanted, table))
    wrong = wrong or _differences(_settings(model), _settings(wanted))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"this model is not the {type(model).__name__} that its config.json would describe, and would be read as "
            f"another model: {'; '.join(wrong[:_SHOWN])}{more}. Give the model a family of its own (family=), or store it "
            "with checkpoint.Checkpointer"
        )


def _is_quantized(x: Any) -> bool:
    return isinstance(x, nn.quantized.QuantizedWeight)


def _differences(here: Mapping[str, str], configured: Mapping[str, str]) -> list[str]:
    """Lists what differs between the model and the one that its configuration describes, by name."""
    names = sorted(name for name in {*here, *configured} if here.get(name) != configured.get(name))
    return [
        f"{name} is {here.get(name, 'absent')} here, {configured.get(name, 'absent')} by the configuration"
        for name in names
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
