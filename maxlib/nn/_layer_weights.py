"""How the weights of a scanned layer are laid out in memory, so that XLA neither casts nor transposes a whole stack."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import _xla_workarounds
from maxlib.hardware import current_device
from maxlib.nn.tree import is_variable
from maxlib.sharding import current, shard_map_by_name


def pin_row_major(layer: Any) -> Any:
    """Pins the weights of a sharded stack's layer to row-major order.

    Otherwise XLA for GPUs transposes every layer before the loop (`_xla_workarounds.row_major`).
    """
    if current() is None or current_device()[0] != "gpu":
        return layer

    def keep(leaf):
        names = leaf.get_metadata().get("axes", ()) if is_variable(leaf) else ()
        value = leaf.get_value() if len(names) > 1 else None
        return leaf.replace(_row_major(value, names)) if isinstance(value, jax.Array) else leaf

    return jax.tree.map(keep, layer, is_leaf=is_variable)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _row_major(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Returns `weight` with each device's part in row-major order."""
    return shard_map_by_name(_xla_workarounds.row_major, [names], names)(weight)


@_row_major.defjvp
def _(names, primals, tangents):
    return _row_major(*primals, names), *tangents


@jax.custom_jvp
def keep_float32(weight: jax.Array) -> jax.Array:
    """Returns `weight` and prevents XLA from casting it before the loop (`_xla_workarounds.keep_float32`).

    Does nothing on a CPU, where it would copy the weights of each layer.
    """
    needed = weight.dtype == jnp.float32 and current_device()[0] != "cpu"
    return _xla_workarounds.keep_float32(weight) if needed else weight


@keep_float32.defjvp
def _(primals, tangents):
    return keep_float32(*primals), *tangents


def gradients_together(layer: Any, x: Any) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten((layer, x))
    real = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    found = iter(_gradients_together(*(leaf for leaf, yes in zip(leaves, real) if yes)))
    return tree.unflatten([next(found) if yes else leaf for leaf, yes in zip(leaves, real)])


@jax.custom_jvp
def _gradients_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


@functools.partial(_gradients_together.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
    found = iter(jax.lax.optimization_barrier([t for t, no in zip(tangents, zero) if not no]))
    return tuple(primals), tuple(t if no else next(found) for t, no in zip(tangents, zero))
