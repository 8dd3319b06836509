"""Experts on other devices: tokens travel to them and back, all-to-all (GShard, arXiv:2006.16668)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn import dispatch

Experts = Callable[[Float[Array, "R D"], dispatch.Plan], Float[Array, "R D"]]


def dropless(
    x: Float[Array, "M D"],
    experts: Int[Array, "M X"],
    weights: Float[Array, "M X"],
    input_weights: Float[Array, "M X"] | None,
    valid: Bool[Array, " M"],
    *,
    apply: Experts,
    num_experts: int,
    axis: str,
) -> tuple[Float[Array, "M D"], Bool[Array, "M X"]]:
    """What `apply`, this device's part of `num_experts` split over `axis`, makes of everybody's tokens; nothing is
    dropped.

    Usually every device gets about the same, and two turns with room for twice an even share do. But all choices may go
    to one device. Then as many turns are taken as there are devices, each with a part of the tokens and room for all
    choices of that part: in either way buffers are as large as all choices of a device's own tokens. The backward pass
    computes turns again.
    """
    devices, tokens = lax.axis_size(axis), (x, experts, weights, input_weights, valid)
    one = functools.partial(_turn, apply=apply, num_experts=num_experts, axis=axis)
    turns = lambda wanted: wanted if x.shape[0] % wanted == 0 else 1
    few, many = turns(2), turns(devices)
    even = min(-(-2 * experts.size // (few * devices)), experts.size // few)
    usual = functools.partial(_turns, one, few, even)
    worst = functools.partial(_turns, one, many, experts.size // many)  # room for any choice
    busiest = _busiest(experts // (num_experts // devices), valid, few, devices)
    y = lax.cond(busiest <= even, usual, worst, tokens) if few < devices else worst(tokens)
    return y, jnp.broadcast_to(valid[:, None], experts.shape)


def _busiest(device: Int[Array, "M X"], valid: Bool[Array, " M"], turns: int, devices: int) -> Int[Array, ""]:
    """The most choices that any device of the mesh sends to another one in a turn."""
    ids = jnp.where(valid[:, None], device, devices).reshape(turns, -1)
    counts = jnp.sum(ids[:, :, None] == jnp.arange(devices)[None, None], axis=1)
    return lax.pmax(counts.max(), jax.sharding.get_abstract_mesh().axis_names)


def _turns(one: Callable[..., Array], turns: int, capacity: int, tokens: Any) -> Float[Array, "M D"]:
    cut = jax.tree.map(lambda a: a.reshape(turns, -1, *a.shape[1:]), tokens)
    run = jax.checkpoint(functools.partial(one, capacity=capacity))
    return lax.scan(lambda _, tokens: (None, run(*tokens)), None, cut)[1].reshape(tokens[0].shape)


def _turn(x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str, capacity: int):
    here = num_experts // lax.axis_size(axis)
    there = dispatch.padded(experts // here, valid, num_experts // here, capacity=capacity)
    rows = dispatch.spread(x, there)
    if input_weights is not None:
        rows = (rows * dispatch.spread_choices(input_weights, there)).astype(x.dtype)
    # Counted from one: zero is a row that holds nothing.
    numbers = (experts % here + 1).reshape(-1).at[there.source].get(mode="fill", fill_value=0)
    rows, numbers = (_swap(a, axis) for a in (rows, numbers))
    plan = dispatch.dropless(numbers[:, None] - 1, numbers > 0, here)
    made = dispatch.collect(apply(dispatch.spread(rows, plan), plan), plan)[:, 0]
    each = dispatch.collect(_swap(made, axis), there)
    return jnp.einsum("MXD,MX->MD", each, jnp.where(there.kept, weights, 0)).astype(x.dtype)


def _swap(rows, axis: str):
    """Part `i` of the rows goes to device `i`."""
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)


def with_capacity(
    rows: Float[Array, "B R D"],
    apply: Callable[[Float[Array, "E C D"]], Float[Array, "E C D"]],
    *,
    num_experts: int,
    axis: str,
) -> Float[Array, "B R D"]:
    """What `apply`, this device's experts, makes of the rows that all devices hold for them, `capacity` for each expert
    and batch row.
    """
    B, R, D = rows.shape
    rows = rows.reshape(B, num_experts, R // num_experts, D)
    rows = lax.all_to_all(rows, axis, split_axis=1, concat_axis=0, tiled=True)
    made = jax.vmap(apply)(rows)
    return lax.all_to_all(made, axis, split_axis=0, concat_axis=1, tiled=True).reshape(B, R, D)
