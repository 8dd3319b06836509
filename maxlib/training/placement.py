"""Batches and models in their place on a mesh, or on the default device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from maxlib import sharding
from maxlib.training.losses import Batch


def place_batch(batch: dict[str, Any], mesh: Mesh | None, rules: sharding.Rules) -> Batch:
    """This host's rows as the part of a global batch that its devices hold."""
    if mesh is None:
        return jax.device_put(batch)

    def put(name: str, x: Any) -> jax.Array:
        names = ("batch", "seq") if x.ndim == 2 else ("batch",) + (None,) * (x.ndim - 1)
        place = NamedSharding(mesh, sharding.spec(names, rules, what=name))
        try:
            return jax.make_array_from_process_local_data(place, x)
        except ValueError as error:
            raise ValueError(
                f"the batch's {name} ({x.shape} on this host) must divide over the mesh {dict(mesh.shape)} as {place.spec} "
                "says: choose a batch size that is a multiple of those degrees, or another mesh"
            ) from error

    return {name: put(name, np.asarray(x)) for name, x in batch.items()}


def own_model(model: nnx.Module | Callable[[], nnx.Module], mesh: Mesh | None, rules: sharding.Rules) -> Any:
    """A model that nobody else holds: built in its place, or copied there."""
    if not isinstance(model, nnx.Module):
        return jax.jit(model)() if mesh is None else sharding.create(model, mesh, rules)
    if mesh is None:
        return jax.tree.map(jnp.copy, model)
    places = sharding.shardings(model, mesh, rules)
    return jax.tree.map(lambda x, place: jax.device_put(x, place, may_alias=False), model, places)
