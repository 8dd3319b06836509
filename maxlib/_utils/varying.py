"""Helpers for the mesh axes that arrays vary over inside `jax.shard_map`; outside of it they do nothing."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

NO_MESH = Mesh(np.empty((), object), ())  # to be set where arrays are on one device, whatever mesh the caller has set


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array varies, as far as JAX tracks them."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Any, axes: frozenset[str]) -> Any:
    """Marks an array as varying over these mesh axes, too."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(arrays: Any) -> Any:
    """Marks all arrays of a pytree as varying over every mesh axis that any of them varies over.

    Loops require equal types of carry and body. In return JAX sums the gradients of replicated operands over devices.
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: vary(x, axes), arrays)


def is_tracked(*arrays: Any) -> bool:
    """Returns True if JAX tracks the mesh axes over which one of the arrays varies."""
    return any(isinstance(x, jax.Array) and bool(varying(x)) for x in arrays)
