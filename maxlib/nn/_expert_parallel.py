"""Experts on other devices: tokens travel to them and back, all-to-all (GShard, arXiv:2006.16668)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn import _expert_dispatch as dispatch
from maxlib.nn._pytree import pytree
from maxlib.ops._attention.dispatch import current_device
from maxlib.sharding import current
from maxlib.sharding.pipelining import stages

# Where XLA has `ragged_all_to_all`, and where it is chosen.
CAN_RAGGED, BEST_RAGGED = ("tpu", "gpu"), ("tpu",)
ROOM = 2  # for so many times an even share
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

    `is_ragged` chooses how rows travel. Ragged, no more do than there are, and only what a device gets from all others
    together has to have room; else pieces have one size, and what it gets from each.
    """
    devices, tokens, ragged = lax.axis_size(axis), (x, experts, weights, input_weights, valid), is_ragged()
    turn = _ragged_turn if ragged else _turn
    one = functools.partial(turn, apply=apply, num_experts=num_experts, axis=axis)
    turns = lambda wanted: wanted if x.shape[0] % wanted == 0 else 1
    few, many = turns(2), turns(devices)
    each = devices if ragged else 1  # a capacity is of what a device gets in all, or from each other one
    even = min(-(-ROOM * experts.size * each // (few * devices)), experts.size * each // few)
    usual = functools.partial(_turns, one, few, even)
    worst = functools.partial(_turns, one, many, experts.size * each // many)  # room for any choice
    busiest = _busiest(experts // (num_experts // devices), valid, few, devices, axis if ragged else None)
    y = lax.cond(_of_all(busiest) <= even, usual, worst, tokens) if few < devices else worst(tokens)
    return y, jnp.broadcast_to(valid[:, None], experts.shape)


def is_ragged() -> bool:
    """Whether tokens travel in pieces as large as they are: as the layout says (`ExpertParallel.how`), else where it is
    known to suit (docs/decisions/0011).

    Raises ValueError where the layout says so and XLA cannot.
    """
    layout, (platform, _) = current(), current_device()
    how = layout.experts.how if layout is not None and layout.experts is not None else None
    if how is None:  # nobody has seen one under the vmap of a pipeline's stages
        return platform in BEST_RAGGED and stages() == 1
    if how == "ragged" and platform not in CAN_RAGGED:
        raise ValueError(
            f"tokens can travel ragged on {' and '.join(CAN_RAGGED)}, not on {platform}: leave how='ragged' out of "
            "sharding.ExpertParallel"
        )
    return how == "ragged"


def _busiest(
    device: Int[Array, "M X"], valid: Bool[Array, " M"], turns: int, devices: int, axis: str | None
) -> Int[Array, ""]:
    """The most choices that any device of the mesh sends to another one in a turn, or gets over `axis`."""
    ids = jnp.where(valid[:, None], device, devices).reshape(turns, -1)
    counts = jnp.sum(ids[:, :, None] == jnp.arange(devices)[None, None], axis=1)
    counts = counts if axis is None else lax.psum(counts, axis)
    return lax.pmax(counts.max(), jax.sharding.get_abstract_mesh().axis_names)


@jax.custom_batching.custom_vmap
def _of_all(busiest: Int[Array, ""]) -> Int[Array, ""]:
    """The same; the most of all stages, where a pipeline computes them at once. They choose together: under vmap a
    choice of each by itself would be computed both ways."""
    return busiest


@_of_all.def_vmap
def _(stages: int, is_batched: list[bool], busiest: Int[Array, "..."]) -> tuple[Int[Array, "..."], bool]:
    return (jnp.max(busiest, axis=0) if is_batched[0] else busiest), False


def _turns(one: Callable[..., Array], turns: int, capacity: int, tokens: Any) -> Float[Array, "M D"]:
    cut = jax.tree.map(lambda a: a.reshape(turns, -1, *a.shape[1:]), tokens)
    run = jax.checkpoint(functools.partial(one, capacity=capacity))
    return lax.scan(lambda _, tokens: (None, run(*tokens)), None, cut)[1].reshape(tokens[0].shape)


def _turn(x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str, capacity: int):
    """`capacity` rows for each device, full or not."""
    here = num_experts // lax.axis_size(axis)
    there = dispatch.padded(experts // here, valid, num_experts // here, capacity=capacity)
    rows = _scaled(x, input_weights, there)
    # Counted from one: zero is a row that holds nothing.
    numbers = (experts % here + 1).reshape(-1).at[there.source].get(mode="fill", fill_value=0)
    rows, numbers = (_swap(a, axis) for a in (rows, numbers))
    plan = dispatch.dropless(numbers[:, None] - 1, numbers > 0, here)
    made = dispatch.collect(apply(dispatch.spread(rows, plan), plan), plan)[:, 0]
    return _weighted(_swap(made, axis), weights, there).astype(x.dtype)


def _ragged_turn(x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str, capacity: int):
    """Just the rows there are; they arrive sorted by expert, among `capacity` in all."""
    plan = dispatch.dropless(experts, valid, num_experts)
    rows = _scaled(x, input_weights, plan)
    out, back, counts = _routes(plan.counts, axis)
    made = apply(_travel(rows, out, back, axis, capacity), dispatch.sorted_rows(counts, capacity))
    return _weighted(_travel(made, back, out, axis, rows.shape[0]), weights, plan).astype(x.dtype)


def _scaled(x, input_weights, plan: dispatch.Plan):
    rows = dispatch.spread(x, plan)
    if input_weights is None:
        return rows
    return (rows * dispatch.spread_choices(input_weights, plan)).astype(x.dtype)


def _weighted(rows, weights, plan: dispatch.Plan):
    return jnp.einsum("MXD,MX->MD", dispatch.collect(rows, plan), jnp.where(plan.kept, weights, 0))


def _swap(rows, axis: str):
    """Part `i` of the rows goes to device `i`."""
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)


@pytree
class Route:
    """Slices of rows, several for each device: where each starts here, its size, and where it starts there."""

    start: Int[Array, " S"]
    size: Int[Array, " S"]
    there: Int[Array, " S"]


def _routes(counts: Int[Array, " E"], axis: str) -> tuple[Route, Route, Int[Array, " H"]]:
    """The way out of rows that lie sorted by expert, `counts` of each, the way back, and how many rows each expert of
    this device gets.

    They lie there by expert, then by the device they are from.
    """
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    all_ = lax.all_gather(counts, axis).reshape(devices, devices, -1)  # from, to, expert
    home = _starts(all_.reshape(devices, -1)).reshape(all_.shape)
    lies = jnp.moveaxis(all_, 0, 2)  # to, expert, from
    lies = jnp.moveaxis(_starts(lies.reshape(devices, -1)).reshape(lies.shape), 2, 0)
    own, comes = (lambda a: a[me].reshape(-1)), (lambda a: a[:, me].reshape(-1))
    out = Route(own(home), own(all_), own(lies))
    return out, Route(comes(lies), comes(all_), comes(home)), all_[:, me].sum(axis=0)


def _starts(sizes: Int[Array, "N S"]) -> Int[Array, "N S"]:
    return jnp.cumsum(sizes, axis=1) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _travel(rows: Float[Array, "R D"], out: Route, back: Route, axis: str, size: int) -> Float[Array, "N D"]:
    """`rows` on their way `out`, among `size` of which the others are zeros. What comes goes the way `back`, and so do
    gradients.
    """
    room = jnp.zeros((size, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(rows, room, out.start, out.size, out.there, back.size, axis_name=axis)


def _travel_forward(rows, out, back, axis, size):
    return _travel(rows, out, back, axis, size), (out, back, rows.shape[0])


def _travel_backward(axis, size, kept, d):
    out, back, rows = kept
    return _travel(d, back, out, axis, rows), None, None


_travel.defvjp(_travel_forward, _travel_backward)


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
