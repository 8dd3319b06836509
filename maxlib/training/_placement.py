"""Puts batches and models on a mesh, or on the default device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import nn, sharding
from maxlib.sharding._create import check_no_aliases, shapes_of
from maxlib.training._objectives.objective import Batch


def batch_names(x: Any) -> tuple[str | None, ...]:
    """Names the axes of an array of a batch: rows, then tokens where there are two axes."""
    return ("batch", "seq") if x.ndim == 2 else ("batch", *[None] * x.ndim)[: x.ndim]


def place_batch(batch: dict[str, Any], layout: sharding.Layout | None) -> Batch:
    """Puts this host's rows on its devices, as their share of a global batch. Arrays already placed are returned as is.

    Args:
      batch: arrays with rows first, `B T` for what belongs to tokens, in dictionaries of any depth.
      layout: of the global batch; None for the default device.
    """
    if layout is None:
        return jax.device_put(batch)
    mesh = layout.mesh

    def put(path: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding_of_batch = NamedSharding(mesh, layout.spec(*batch_names(x), what=name))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding_of_batch, x.ndim):
            return x
        try:
            return jax.make_array_from_process_local_data(sharding_of_batch, np.asarray(x))
        except ValueError as error:
            raise ValueError(
                f"the batch's {name} ({x.shape} on this host) must divide over the mesh {dict(mesh.shape)} as "
                f"{sharding_of_batch.spec} says: choose a batch size that is a multiple of those degrees, or another mesh"
            ) from error

    return jax.tree_util.tree_map_with_path(put, batch)


def place_like_parameters(tree: Any, params: dict[str, Any], rest: Any, *, optimizer: bool = False) -> Any:
    """Constrains gradients, moments and the like to their parameter's sharding; all else is replicated.

    Without this XLA chooses, and may gather a gradient or turn a donated buffer into another layout.

    Args:
      tree: of arrays, keyed by the paths of parameters on some level.
      params: trained parameters by path.
      rest: the rest of the model, with the axis names.
      optimizer: to the sharding of the parameter's optimizer state instead.
    """
    if (layout := sharding.current()) is None:
        return tree
    names = nn.tree.axes(rest)
    spec_of = layout.optimizer_spec if optimizer else layout.parameter_spec

    def put(path, leaf):
        spec = P()
        for name in (getattr(part, "key", None) for part in path):
            if name in params and leaf.shape == params[name].shape:
                spec = spec_of(names[name], leaf.shape, path=name)
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


def materialize_model(model: Any, layout: sharding.Layout | None) -> Any:
    """Returns a model in arrays of its own: built under jit already sharded, or copied to its shardings.

    Args:
      model: a module, a pytree of them, or a function that builds one.
      layout: None for the default device.

    Raises:
      ValueError: when a parameter stands at two places of the model (`self.head = self.embed`).
    """
    if not isinstance(model, nnx.Module) and callable(model):
        if layout is not None:
            return sharding.create(model, layout)
        shapes_of(model)  # the check alone: jit compiles the same function only once
        return jax.jit(model)()
    check_no_aliases(model)
    if layout is None:
        return jax.tree.map(jnp.copy, model)
    shardings = sharding.shardings(model, layout)
    return jax.tree.map(lambda x, to: jax.device_put(x, to, may_alias=False), model, shardings)
