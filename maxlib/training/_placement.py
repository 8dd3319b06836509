"""Batches and models in their place on a mesh, or on the default device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import nn, sharding
from maxlib.training._objectives.objective import Batch


def batch_names(x: Any) -> tuple[str | None, ...]:
    """Names the axes of an array of a batch: rows, then tokens where there are two axes."""
    return ("batch", "seq") if x.ndim == 2 else ("batch", *[None] * x.ndim)[: x.ndim]


def place_batch(batch: dict[str, Any], layout: sharding.Layout | None) -> Batch:
    """Places this host's rows as the part of a global batch that its devices hold. What is in its place already stays
    as it is.

    Args:
      batch: arrays with rows first, `B T` for what belongs to tokens, in dictionaries of any depth.
      layout: of the global batch; None for the default device.
    """
    if layout is None:
        return jax.device_put(batch)
    mesh = layout.mesh

    def put(path: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        place = NamedSharding(mesh, layout.spec(*batch_names(x), what=name))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(place, x.ndim):
            return x
        try:
            return jax.make_array_from_process_local_data(place, np.asarray(x))
        except ValueError as error:
            raise ValueError(
                f"the batch's {name} ({x.shape} on this host) must divide over the mesh {dict(mesh.shape)} as {place.spec} "
                "says: choose a batch size that is a multiple of those degrees, or another mesh"
            ) from error

    return jax.tree_util.tree_map_with_path(put, batch)


def place_like_parameters(tree: Any, params: dict[str, Any], rest: Any, *, optimizer: bool = False) -> Any:
    """Constrains gradients, moments and the like to the place of their parameter; all else is on every device.

    Without this XLA chooses, and may gather a gradient or turn a donated buffer into another layout.

    Args:
      tree: of arrays, keyed by the paths of parameters on some level.
      params: trained parameters by path.
      rest: the rest of the model, with the axis names.
      optimizer: to the place of the optimizer's state of their parameter instead.
    """
    if (layout := sharding.current()) is None:
        return tree
    names = nn.tree.axes(rest)

    def put(path, leaf):
        spec = P()
        for name in (getattr(part, "key", None) for part in path):
            if name in params and leaf.shape == params[name].shape:
                spec = layout.parameter_spec(names[name], leaf.shape, path=name)
                if optimizer:
                    spec = layout.optimizer_spec(names[name], leaf.shape, path=name)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(put, tree)


def host_rows(batch: Batch) -> Batch:
    """Returns this host's rows of a batch, whether or not `place_batch` has seen it."""

    def rows(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        assert isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh)  # of place_batch
        return multihost_utils.global_array_to_host_local_array(x, x.sharding.mesh, x.sharding.spec)

    return jax.tree.map(rows, batch)


def own_model(model: Any, layout: sharding.Layout | None) -> Any:
    """Makes a model (a module, a pytree of them, or a function that builds one) that nobody else holds."""
    if not isinstance(model, nnx.Module) and callable(model):
        return jax.jit(model)() if layout is None else sharding.create(model, layout)
    if layout is None:
        return jax.tree.map(jnp.copy, model)
    places = sharding.shardings(model, layout)
    return jax.tree.map(lambda x, place: jax.device_put(x, place, may_alias=False), model, places)
