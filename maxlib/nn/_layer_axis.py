"""The leading axis of layers that are stored together: named when layers are stacked, removed when one is taken out."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from maxlib.sharding.layers import is_stacked

Tree = TypeVar("Tree")


def _map_variables(change: Callable[[nnx.Variable], nnx.Variable], tree: Any) -> Any:
    """Applies `change` to every variable of `tree`."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree.map(lambda x: change(x) if is_variable(x) else x, tree, is_leaf=is_variable)


def _axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Returns the axis names of a variable, `()` if it has none."""
    return tuple(variable.get_metadata().get("axes", ()))


def with_layer_axis(layer: Tree, name: str) -> Tree:
    """Names the leading axis of every variable: `(heads, embed)` becomes `(name, heads, embed)`.

    A variable without axis names gets None for its other dimensions, and a mark so that `without_layer_axis` removes
    them.
    """

    def add(variable: nnx.Variable) -> nnx.Variable:
        if "axes" in variable.get_metadata():
            return variable.copy(_copy_ref=False, axes=(name, *_axes(variable)))
        unnamed = (None,) * (variable.get_value().ndim - 1)
        return variable.copy(_copy_ref=False, axes=(name, *unnamed), unnamed=True)

    return _map_variables(add, layer)


def without_layer_axis(layer: Tree) -> Tree:
    """Undoes `with_layer_axis` for a layer that was sliced out of several."""

    def remove(variable: nnx.Variable) -> nnx.Variable:
        if not is_stacked(axes := _axes(variable)):
            return variable
        # Only metadata changes here: the caller has already taken one row of the array.
        metadata = variable.get_metadata() | {"axes": axes[1:]}
        if metadata.get("unnamed") and not is_stacked(axes[1:]):
            del metadata["axes"], metadata["unnamed"]
        return type(variable).from_metadata(variable.get_raw_value(), metadata)

    return _map_variables(remove, layer)


def layer_axis(layer: Any) -> str | None:
    """Returns the name of the leading axis if `layer` stores several layers, else None."""
    leaves = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, nnx.Variable))
    names = [_axes(x) for x in leaves if isinstance(x, nnx.Variable)]
    return next((axes[0] for axes in names if is_stacked(axes)), None)


def map_layers(fn: Callable[[Any], Any], layer: Any) -> Any:
    """Applies `fn` to a layer; if several layers are stored together on a leading axis, to all of them with vmap."""
    if (name := layer_axis(layer)) is None:
        return fn(layer)
    # vmap removes the leading axis of arrays; `without_layer_axis` removes its name.
    return with_layer_axis(jax.vmap(lambda one: fn(without_layer_axis(one)))(layer), name)
