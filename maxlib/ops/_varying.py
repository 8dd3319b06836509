"""Which mesh axes arrays vary over inside `jax.shard_map`; outside of it nothing here does anything."""

from typing import Any

import jax


def vary_alike(arrays: Any) -> Any:
    """A pytree of arrays as varying over all axes that any of them varies over.

    Loops insist on that, and JAX then sums the gradients of operands that were the same on several devices.
    """
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves(arrays)))
    missing = lambda x: tuple(sorted(axes - varying(x)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, missing(x), to="varying") if missing(x) else x, arrays)
