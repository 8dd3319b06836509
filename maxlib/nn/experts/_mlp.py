"""What one device computes in a mixture of experts: it sends rows to experts, applies them, and sums the results.

Shapes: R rows in a sorted buffer, M tokens in one group, X chosen experts per token, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops
from maxlib.kernels.grouped_matmul.rows import NAMES
from maxlib.nn.experts import _dispatch as dispatch
from maxlib.nn.experts import _parallel as exchange
from maxlib.nn.matmul import Matmul


def local_experts(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T X"],
    weights: Float[Array, "B T X"],
    input_weights: Float[Array, "B T X"] | None,
    valid: Bool[Array, "B T"],
    *rest: Any,
    activation: Callable[..., Array],
    weight_orders: tuple[ops.ExpertWeightOrder, ops.ExpertWeightOrder],
    capacity: int | None,
    matmuls: tuple[Matmul | None, ...],
    tree: Any,
    num_experts: int,
    axis: str | None,
) -> tuple[Float[Array, "1 B T D"], Bool[Array, "B T X"]]:
    """Applies one device's experts.

    Without a capacity all its tokens are one group; with a capacity each row is a group.

    Args:
        x: Tokens of this device.
        experts: Ids of the chosen experts, counted over all devices.
        weights: Factors on results.
        input_weights: Factors on inputs, or None.
        valid: False for padding.
        *rest: Biases of gate and up (or only up), then the leaves of `tree`.
        activation: Combines the gate and up projections.
        weight_orders: Order of the dimensions of gate and up, and of down.
        capacity: Most tokens of a row that an expert processes; None computes every choice.
        matmuls: Matmul of each projection, None where the adapter in `tree` multiplies.
        tree: Structure of the matrices and adapters, one pair `(w, adapter)` for each projection.
        num_experts: Number E of experts on all devices.
        axis: Mesh axis over which experts are split, or None.

    Returns:
        The weighted sums, with a new first axis on which devices that hold parts of the width F are put side by side,
        and a mask of the choices that were computed.
    """
    into = len(matmuls) - 1
    biases, matrices = rest[:into], jax.tree.unflatten(tree, rest[into:])
    parts = zip(matmuls, matrices, (*biases, None), strict=True)
    linears = [(matmul or adapter, w, b) for matmul, (w, adapter), b in parts]
    apply = functools.partial(_apply, linears=linears, activation=activation, weight_orders=weight_orders)
    split = {"apply": apply, "num_experts": num_experts, "axis": axis}
    if capacity is not None:
        y, computed = _run_rows(x, experts, weights, input_weights, valid, capacity=capacity, **split)
    else:
        # [B, T, ...] -> [B * T, ...]
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, experts, weights, input_weights, valid))
        y, computed = _run_all(*flat, **split)
    # Where gradients need this sum, recomputing it would run the experts, and the exchange of tokens, once more.
    y = checkpoint_name(y, "moe")
    # [B, T, D] -> [1, B, T, D]: the axis of partial sums over the parts of the width.
    return y.reshape(1, *x.shape), computed.reshape(experts.shape)


def _run_all(x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str | None):
    """Computes every choice of M tokens; over an expert axis, tokens are first sent to their experts."""
    if axis is None:
        return _mixed(x, weights, input_weights, dispatch.dropless(experts, valid, num_experts), apply)
    tokens = (x, experts, weights, input_weights, valid)
    return exchange.dropless(*tokens, apply=apply, num_experts=num_experts, axis=axis)


def _run_rows(x, experts, weights, input_weights, valid, *, apply, capacity: int, num_experts: int, axis: str | None):
    """Computes up to `capacity` choices of each row for every expert; over an expert axis, the buffers are
    exchanged.
    """
    plan = jax.vmap(lambda experts, valid: dispatch.padded(experts, valid, num_experts, capacity))(experts, valid)
    if axis is None:
        return jax.vmap(functools.partial(_mixed, apply=apply))(x, weights, input_weights, plan)
    held = num_experts // jax.lax.axis_size(axis)
    # The plan for this device's experts; a padded plan only needs their number.
    local_plan = dataclasses.replace(jax.tree.map(lambda a: a[0], plan), num_experts=held)

    def here(rows, weights):
        flat = [a.reshape(-1, a.shape[-1]) for a in (rows, weights)]
        return apply(*flat, local_plan).reshape(rows.shape)

    # [B, T, D] -> [B, E * capacity, D]; sent to the experts and back.
    rows = jax.vmap(dispatch.weighted_rows)(x, weights, input_weights, plan)
    made = exchange.with_capacity(*rows, here, num_experts=num_experts, axis=axis)
    return jax.vmap(dispatch.combine)(made, plan), plan.computed


def _mixed(x, weights, input_weights, plan: dispatch.Dispatch, apply):
    """Sends tokens to their experts, applies them, and returns the weighted sum and the mask of computed choices."""
    # [M, D] -> [R, D] -> [R, D] -> [M, D]
    return dispatch.combine(apply(*dispatch.weighted_rows(x, weights, input_weights, plan), plan), plan), plan.computed


def _apply(rows, weights, plan: dispatch.Dispatch, *, linears, activation, weight_orders):
    """Applies the experts to the rows of a plan: `down(weights * activation(gate(rows), up(rows)))`, or without gate.

    Weights come before the last matmul, which is linear: rows of width F are fewer bytes than rows of width D, and the
    gradient of the weights needs the former, which the backward pass computes anyhow. After it, the backward pass would
    compute the last matmul again, and send its results back to their tokens again.
    """
    (*gate, up, down), (into, out) = linears, weight_orders
    if gate:
        h = plan.gated(rows, gate[0], up, activation, into)
    else:
        h = activation(checkpoint_name(plan.linear(rows, up, into), NAMES[1]))
    return plan.linear((h * weights).astype(h.dtype), down, out)
