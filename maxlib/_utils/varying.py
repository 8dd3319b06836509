"""Helpers for the mesh axes that arrays vary over inside `jax.shard_map`; outside of it they do nothing."""

from typing import Any

import jax


def vary_alike(arrays: Any) -> Any:
    """Marks all arrays of a pytree as varying over every mesh axis that any of them varies over.

    Loops require equal types of carry and body. In return JAX sums the gradients of replicated operands over devices.
    """

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(arrays)))

    def missing(x):
        return tuple(sorted(axes - varying(x)))

    return jax.tree.map(lambda x: jax.lax.pcast(x, missing(x), to="varying") if missing(x) else x, arrays)


def is_tracked(*arrays: Any) -> bool:
    """Returns True if JAX tracks the mesh axes over which one of the arrays varies."""
    return any(isinstance(x, jax.Array) and bool(jax.typeof(x).manual_axis_type.varying) for x in arrays)
