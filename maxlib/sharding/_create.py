"""Parameters that are born in their place on the mesh."""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib._utils.paths import dotted
from maxlib.sharding._layout import Layout, use

Model = TypeVar("Model")


def shardings(model: Model, layout: Layout) -> Model:
    """Returns `model` with every array replaced by the `NamedSharding` that `layout` gives it.

    Variables without axis names are replicated.

    Args:
        model: a module, or its `jax.eval_shape`.
        layout: the mesh, and how parameters lie on it.

    Raises:
        ValueError: naming the parameter, for an axis that nobody declared, when a mesh axis does not divide a
            dimension, or when two names share a mesh axis.
    """

    def place(path, leaf):
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(layout.mesh, P())
        return leaf.replace(layout.sharding(dotted(path), leaf))

    return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


def create(build: Callable[[], Model], layout: Layout) -> Model:
    """Runs `build` so that every parameter is born in its place; values equal those on one device."""
    places = shardings(jax.eval_shape(build), layout)
    with use(layout):
        return jax.jit(build, out_shardings=places)()
