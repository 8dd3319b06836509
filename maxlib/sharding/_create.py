"""Creates parameters directly as shards on the mesh."""

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
      layout: the mesh and the strategy.

    Raises:
      ValueError: when an axis is not declared, when a mesh axis does not divide a dimension, or when two names of a
        parameter use the same mesh axis; the message names the parameter.
    """

    def place(path, leaf):
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(layout.mesh, P())
        return leaf.replace(layout.sharding(dotted(path), leaf))

    return jax.tree_util.tree_map_with_path(place, model, is_leaf=lambda x: isinstance(x, nnx.Variable))


def create(build: Callable[[], Model], layout: Layout) -> Model:
    """Builds a model whose parameters are created as shards: no device ever holds a whole one.

    Args:
      build: makes the model, such as `lambda: Llama(cfg, rngs=nnx.Rngs(0))`.
      layout: the mesh and the strategy.

    Returns:
      The model. Its values equal those that `build` makes on one device.

    Raises:
      ValueError: as `shardings` does.
    """
    # With out_shardings, XLA splits the random number generation itself: each device computes its own shard.
    places = shardings(jax.eval_shape(build), layout)
    with use(layout):
        return jax.jit(build, out_shardings=places)()
