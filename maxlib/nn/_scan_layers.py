"""Running the layers of one group of a stack: scanned over their repeats, or one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlib.nn._layer_axis import without_layer_axis
from maxlib.nn._layer_rows import Aux
from maxlib.nn._layer_weights import gradients_first, keep_float32, pin_row_major
from maxlib.nn._scan_check import check_layer_axis
from maxlib.nn._with_shared import constant_in_scan, map_activations, only_added, with_earlier
from maxlib.nn.remat import Policy, remat_policy, rematerialised
from maxlib.sharding.memory import to_device
from maxlib.sharding.pipelining import LAYER_INPUT


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
    """Scans the `body` (or `lead`) of a stack, or some of its repeats.

    Args:
        layers: The layers of a period, each with a leading axis of repeats.
        x: Value that passes from layer to layer.
        ctx: Values shared by all layers.
        caches: The cache of each layer, with the same leading axis.
        remat: What layers keep for the backward pass.
        active: One boolean per repeat; an inactive repeat changes nothing and reports zeros. None means that all are
            active.
        inputs: `layer_inputs` of each layer, with the same leading axis; empty if there are none.

    Returns:
        The last layer's `x`, the new caches, and the aux of each layer with a row per repeat.

    Raises:
        ValueError: when an array of a layer has another leading axis than the rest.
    """
    if not len(layers):
        return x, caches, []
    check_layer_axis(layers)
    x, joined, split = constant_in_scan(x)

    def step(x, period):
        # One period: lax.scan has indexed every leading axis, but the layers' metadata still name it.
        layers, caches, active, inputs = period
        layers, policy = without_layer_axis(layers), remat_policy(remat)
        new, caches, aux = _run(joined(x), ctx, layers, caches, inputs, policy, scanned=True)
        new = split(new)
        if active is not None:
            # [] and [B, T, D]: an inactive repeat returns its input.
            new = jax.tree.map(lambda a, b: jnp.where(active, a, b), new, x)
            aux = jax.tree.map(lambda a: jnp.where(active, a, 0), aux)
        return new, (caches, aux)

    x, (caches, aux) = jax.lax.scan(step, x, (layers, caches, active, inputs))
    return joined(x), caches, aux


def run_group(
    layers: Any, x: Any, ctx: Any, caches: Any = None, *, remat: Policy = None, inputs: Any = None
) -> tuple[Any, Any, list[Aux]]:
    """Applies the `prefix` or `suffix` of a stack one by one; arguments and results are those of `scan_group`."""
    return _run(x, ctx, layers, caches, inputs, remat_policy(remat))


def _run(x, ctx, layers, caches, inputs, policy, scanned: bool = False):
    """Applies `layers` one by one, each rematerialised under `policy` if there is one."""
    new_caches, auxes = [], []
    # A scan body needs no protection against common-subexpression elimination. But of several layers, each waits with
    # its input for the gradient of its output, lest all be recomputed at once; its weights may be gathered before.
    in_turn = scanned and len(layers) > 1
    for i, layer in enumerate(layers):
        more = () if inputs is None or inputs[i] is None else (inputs[i],)
        apply = functools.partial(_apply, ctx=ctx, in_remat=policy is not None)
        if policy is not None:
            prevent_cse = (False, True, False, *(False,) * len(more)) if in_turn else not scanned
            apply = rematerialised(apply, policy, prevent_cse=prevent_cse)
            # A policy may name the layer's input, for example to offload it.
            x = map_activations(lambda a: checkpoint_name(a, LAYER_INPUT), x)
            if in_turn:
                layer, x = gradients_first(layer, x)
        after, new, aux = apply(layer, x, None if caches is None else caches[i], *more)
        x = with_earlier(x, after)
        new_caches.append(new)
        auxes.append(aux)
    return x, None if caches is None else new_caches, auxes


def _apply(layer, x, cache, *more, ctx, in_remat: bool):
    """Applies one layer, after copying its weights to the device if they are in host memory."""
    layer = to_device(layer)
    if in_remat:
        layer = pin_row_major(jax.tree.map(keep_float32, layer))
    return only_added(x, layer(x, ctx, cache, *more))
