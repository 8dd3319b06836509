"""Modules that an adapter replaces as a whole: PEFT's `modules_to_save`, and adapted embeddings and heads.

Their variables are marked, so that `save` writes them. Those that PEFT trains are `nnx.LoRAParam`, others plain
variables.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib._utils.paths import dotted

_MARK = "saved_module"


def is_saved(variable: nnx.Variable) -> bool:
    """Returns True for the weights of saved modules."""
    return bool(variable.get_metadata().get(_MARK))


def with_saved(model: Any, values: Mapping[str, Any], trained: Callable[[str], bool]) -> Any:
    """Returns the model with new weights by path, marked as saved; `trained` says by path which are trainable."""

    def put(path: str, variable: nnx.Variable) -> nnx.Variable:
        if path not in values:
            return variable
        kind, old = nnx.LoRAParam if trained(path) else nnx.Variable, variable.get_value()
        new = jax.device_put(jnp.asarray(values[path], old.dtype), old.sharding)
        return kind(new, **variable.get_metadata() | {_MARK: True})

    return _map_variables(model, put)


def trained_whole(model: Any, prefix: str) -> Any:
    """Returns the model with the weights of a module marked as saved and trainable; `prefix` begins their paths."""

    def mark(path: str, variable: nnx.Variable) -> nnx.Variable:
        if not path.startswith(prefix):
            return variable
        return nnx.LoRAParam(variable.get_value(), **variable.get_metadata() | {_MARK: True})

    return _map_variables(model, mark)


def not_trained(model: Any) -> Any:
    """Returns the model with saved modules that are copied, and no longer trainable."""

    def fix(path: str, variable: nnx.Variable) -> nnx.Variable:
        return nnx.Variable(jnp.copy(variable[...]), **variable.get_metadata()) if is_saved(variable) else variable

    return _map_variables(model, fix)


def as_parameters(model: Any) -> Any:
    """Returns the model with saved modules as its own parameters."""

    def unmark(path: str, variable: nnx.Variable) -> nnx.Variable:
        metadata = {name: value for name, value in variable.get_metadata().items() if name != _MARK}
        return nnx.Param(variable.get_value(), **metadata) if is_saved(variable) else variable

    return _map_variables(model, unmark)


def is_tied(model: Any) -> bool:
    """Returns True if the embedding is the head, too."""
    return getattr(getattr(model, "cfg", None), "tied", False) and model.head is None


def untied(model: Any) -> Any:
    """Returns a model whose head is a copy of its embedding, if they are one table; else the model itself."""
    if not is_tied(model):
        return model
    new = jax.tree.map(lambda a: a, model)
    new.head = nnx.data(jax.tree.map(jnp.copy, model.embed))
    new.cfg = dataclasses.replace(model.cfg, tied=False)
    return new


def tied(model: Any) -> Any:
    """Returns an untied model whose embedding is the head, too."""
    new = jax.tree.map(lambda a: a, model)
    new.head = nnx.static(None)
    new.cfg = dataclasses.replace(model.cfg, tied=True)
    return new


def _map_variables(model: Any, change: Callable[[str, nnx.Variable], nnx.Variable]) -> Any:
    """Applies `change` to the path and the variable of everything that the model stores."""

    def at(path: Any, leaf: Any) -> Any:
        return change(dotted(path), leaf) if nn.tree.is_variable(leaf) else leaf

    return jax.tree_util.tree_map_with_path(at, model, is_leaf=nn.tree.is_variable)
