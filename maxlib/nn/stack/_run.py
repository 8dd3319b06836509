"""Running the layers of a group: scanned over their repeats, or one by one."""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlib import _xla_workarounds
from maxlib._utils.paths import dotted
from maxlib.hardware import current_device
from maxlib.nn._pytree import pytree
from maxlib.nn.remat import Policy, remat_policy, rematerialised
from maxlib.nn.stack._storage import without_layer_axis
from maxlib.nn.tree import is_variable
from maxlib.sharding import current, shard_map_by_name
from maxlib.sharding.memory import to_device
from maxlib.sharding.pipelining import LAYER_INPUT

Aux = dict[str, jax.Array]


@pytree
class Carry:
    """Activations together with values that earlier layers share with later ones (keys and values, chosen tokens).

    A layer that is stored alone may add entries to `shared`; no layer may change or remove them. Scanned layers only
    read them, so they are constants of the scan: there is one copy, which sums the gradients of all readers.

    Args:
        x: Activations, which every layer changes.
        shared: Pytrees by name.
    """

    x: Any
    shared: Mapping[str, Any]

    def updated(self, x: Any, **shared: Any) -> "Carry":
        """Returns a copy with a new `x` and with entries added to `shared`."""
        return Carry(x, {**self.shared, **shared})


def scan_group(
    layers: Any,
    x: Any,
    ctx: Any,
    caches: Any = None,
    *,
    remat: Policy = None,
    active: jax.Array | None = None,
    inputs: Any = None,
) -> tuple[Any, Any, list[Aux]]:
    """Scans the layers of a group, or of some of its repeats.

    Args:
        layers: The layers of a period, each with a leading axis of repeats.
        x: Value that passes from layer to layer.
        ctx: Values shared by all layers.
        caches: The cache of each layer, with the same leading axis.
        remat: What layers keep for the backward pass.
        active: One boolean per repeat; an inactive repeat changes nothing and reports zeros. None means that all are
            active.
        inputs: `layer_inputs` of each layer, with the same leading axis; None if there are none.

    Returns:
        The last layer's `x`, the new caches, and the aux of each layer with a row per repeat.

    Raises:
        ValueError: when an array of a layer has another leading axis than the rest, or a layer shares values.
    """
    _check_leading_axis(layers)
    # The values shared by earlier layers are closed over, not carried: a scan saves closed-over values once, but the
    # carry for every iteration.
    shared = x.shared if isinstance(x, Carry) else None

    def join(activations: Any) -> Any:
        return activations if shared is None else Carry(activations, shared)

    def step(carry, period):
        # One period: lax.scan has indexed every leading axis, but the layers' metadata still name it.
        layers, caches, active, inputs = period
        new, caches, aux = _apply_layers(
            without_layer_axis(layers), join(carry), ctx, caches, remat_policy(remat), inputs, scanned=True
        )
        new = new if shared is None else _carry(new, shared)
        if active is not None:
            # [] and [B, T, D]: an inactive repeat returns its input.
            new = jax.tree.map(lambda a, b: jnp.where(active, a, b), new, carry)
            aux = jax.tree.map(lambda a: jnp.where(active, a, 0), aux)
        return new, (caches, aux)

    x, (caches, aux) = jax.lax.scan(step, x if shared is None else x.x, (layers, caches, active, inputs))
    return join(x), caches, aux


def run_alone(
    layers: Any, x: Any, ctx: Any, caches: Any = None, *, remat: Policy = None, inputs: Any = None
) -> tuple[Any, Any, list[Aux]]:
    """Applies layers that are stored alone; arguments and results are those of `scan_group`, without the leading
    axis.
    """
    return _apply_layers(layers, x, ctx, caches, remat_policy(remat), inputs, scanned=False)


def _apply_layers(layers, x, ctx, caches, policy, inputs, scanned: bool) -> tuple[Any, Any, list[Aux]]:
    """Applies layers one by one, each rematerialised under `policy` if there is one."""
    new_caches, auxes = [], []
    # A scan body needs no protection against common-subexpression elimination. But the layers of a period are to be
    # recomputed one at a time: each waits with its input for the gradient of its output. Weights may be gathered
    # before.
    in_turn = scanned and len(layers) > 1
    for i, layer in enumerate(layers):
        layer_input = () if inputs is None or inputs[i] is None else (inputs[i],)
        apply = functools.partial(_apply, ctx=ctx, in_remat=policy is not None)
        x = _named(x, "resid_pre")  # `nn.capture` counts layers by this name
        if policy is not None:
            prevent_cse = (False, True, False, *(False,) * len(layer_input)) if in_turn else not scanned
            apply = rematerialised(apply, policy, prevent_cse=prevent_cse)
            # A policy may name the layer's input, for example to offload it.
            x = _map_activations(lambda a: checkpoint_name(a, LAYER_INPUT), x)
            if in_turn:
                layer, x = gradients_first(layer, x)
        y, new_cache, aux = apply(layer, x, None if caches is None else caches[i], *layer_input)
        x = _named(x.updated(y.x, **y.shared) if isinstance(y, Carry) else y, "resid_post")
        new_caches.append(new_cache)
        auxes.append(aux)
    return x, None if caches is None else new_caches, auxes


def _apply(layer, x, cache, *layer_input, ctx, in_remat: bool):
    """Applies one layer, after copying its weights to the device if they are in host memory; of shared values, only
    the layer's own are returned.
    """
    layer = to_device(layer)
    if in_remat:
        layer = pin_row_major(jax.tree.map(keep_float32, layer))
    y, cache, aux = layer(x, ctx, cache, *layer_input)
    # jax.checkpoint keeps its outputs, so values that only pass through would be kept once per layer.
    if isinstance(y, Carry):
        y = Carry(y.x, {name: value for name, value in y.shared.items() if name not in x.shared})
    return y, cache, aux


def _named(x: Any, name: str) -> Any:
    """Names the first array of the activations, which is the residual stream."""
    if isinstance(x, Carry):
        return Carry(_named(x.x, name), x.shared)
    leaves, tree = jax.tree.flatten(x)
    return tree.unflatten([checkpoint_name(leaves[0], name), *leaves[1:]])


def _map_activations(fn: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """Applies `fn` to the activations, and not to the values shared by earlier layers."""
    return Carry(jax.tree.map(fn, x.x), x.shared) if isinstance(x, Carry) else jax.tree.map(fn, x)


def _carry(x: Carry, shared: Mapping[str, Any]) -> Any:
    """Returns the activations that a scan carries. Raises ValueError if a scanned layer shares anything."""
    if added := sorted(x.shared.keys() - shared.keys()):
        raise ValueError(
            f"a scanned layer shares {', '.join(added)}: only a layer that is stored alone can, because each repeat "
            "would share its own. Give it a kind that no other layer has"
        )
    return x.x


def _check_leading_axis(layers: Any) -> None:
    """Raises ValueError unless all arrays of layers that are scanned together have a leading axis of one size."""
    # Arrays of n layers are [n, ...]; an array of a part made for one layer lacks the n.
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    rows = {dotted(path).removesuffix(".value"): jnp.shape(x)[:1] for path, x in leaves}
    # The size that most arrays have is right: a new part is a few of many.
    counts = collections.Counter(rows.values())
    most = max(counts, key=lambda size: counts[size], default=())
    wrong = next((path for path, size in rows.items() if size != most), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong} of a scanned block lacks the axis of layers, of size {', '.join(map(str, most))}: a scanned block "
            "stores several layers. To give each layer a new part, take the layers out of the scan with "
            "`alone = model.layers.unstacked()`, change each `alone[i]`, and scan them again with `alone.restacked()`"
        )


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
    # Skip frozen weights: waiting would force their unused gradients. None and () are no leaves of a pytree, so the
    # backward pass knows at trace time which is which.
    trained = [() if weight.perturbed else None for weight in weights]
    return ([weight.value for weight in weights], [value.value for value in values]), trained


def _wait(trained, gradients):
    weights, values = gradients
    first = [g for g, is_trained in zip(weights, trained, strict=True) if is_trained is not None and _is_array(g)]
    waiting = iter(_xla_workarounds.after([g for g in values if _is_array(g)], first))
    return weights, [next(waiting) if _is_array(g) else g for g in values]


def _is_array(gradient: Any) -> bool:
    """Returns False for zeros, and for the gradient of integers."""
    return isinstance(gradient, jax.Array) and jnp.issubdtype(gradient.dtype, jnp.inexact)


_gradients_first.defvjp(_keep_trained, _wait, symbolic_zeros=True)
