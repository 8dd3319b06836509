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


def gradients_first(layer: Any, x: Any) -> tuple[Any, Any]:
    """Returns `layer` and `x`. In the backward pass on TPUs the gradient of `x` waits for those of `layer`
    (`_xla_workarounds.after`).
    """
    if current_device()[0] != "tpu":
        return layer, x
    (weights, rebuild_layer), (values, rebuild_x) = jax.tree.flatten(layer), jax.tree.flatten(x)
    weights, values = _gradients_first(weights, values)
    return rebuild_layer.unflatten(weights), rebuild_x.unflatten(values)


@jax.custom_vjp
def _gradients_first(weights: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
    return weights, values


def _keep_trained(weights, values):
    # For a weight that is not trained (of a frozen base) nothing waits: its gradient would be computed for that alone.
    # None and () are no leaves of a pytree, so that the backward pass knows at trace time which is which.
    trained = [() if one.perturbed else None for one in weights]
    return tuple([one.value for one in found] for found in (weights, values)), trained


def _wait(trained, gradients):
    weights, values = gradients
    found = [g for g, one in zip(weights, trained, strict=True) if one is not None and _is_array(g)]
    waiting = iter(_xla_workarounds.after([g for g in values if _is_array(g)], found))
    return weights, [next(waiting) if _is_array(g) else g for g in values]


def _is_array(gradient: Any) -> bool:
    """Returns False for zeros, and for the gradient of integers."""
    return isinstance(gradient, jax.Array) and jnp.issubdtype(gradient.dtype, jnp.inexact)


_gradients_first.defvjp(_keep_trained, _wait, symbolic_zeros=True)
