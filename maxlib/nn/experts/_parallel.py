"""Expert parallelism: tokens travel to the devices of their experts and back, all-to-all (GShard, arXiv:2006.16668).

The functions run inside a shard_map. Shapes: M tokens of this device, X choices, E experts in all, H experts of this
device, D width, R rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxlib.hardware import current_device
from maxlib.nn._pytree import pytree
from maxlib.nn.experts import _dispatch as dispatch
from maxlib.sharding import ExpertParallel, current
from maxlib.sharding.pipelining import stages

# Platforms on which XLA has `ragged_all_to_all`.
CAN_RAGGED = ("tpu", "gpu")
Experts = Callable[[Float[Array, "R D"], Float[Array, "R 1"], dispatch.Plan], Float[Array, "R D"]]
# Rows that lie together in a TPU's memory. If they travel together, arrays keep their layout; single rows would have to
# be copied into another layout before an exchange, and back behind it.
TILE = 8
# Buffers of many rows are as long as whole tiles of a grouped matmul (`MegabloxTiles`), which would pad them by a copy.
LENGTH = 512


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
) -> Float[Array, "M D"]:
    """Applies the experts of all devices to this device's tokens; no choice is dropped.

    Buffers have a static size, but any number of tokens may choose a device's experts. If tokens are spread about
    evenly, two rounds run, each with half the tokens and buffers of `ExpertParallel.room` times an even share, or of
    `ExpertParallel.even` times it if that is enough for a ragged exchange: elementwise operations pass over the whole
    buffer. If some device would get more, there are as many rounds as devices, each with buffers for all choices of its
    tokens. Either way a buffer is at most as large as all choices of a device's own tokens. The backward pass
    recomputes each round.

    `is_ragged` chooses the exchange. A ragged exchange sends only rows that exist, if they are many for each expert in
    whole tiles, and a buffer has room for all rows that a device receives; a dense exchange sends pieces of equal size
    to every device.

    Args:
        x: Tokens.
        experts: Ids of the chosen experts, counted over all devices.
        weights: Factors on results.
        input_weights: Factors on inputs, or None.
        valid: False for padding.
        apply: This device's experts, applied to rows with factors on their results under a plan.
        num_experts: Number E of experts on all devices.
        axis: Mesh axis over which experts are split.

    Returns:
        The weighted sums, `M D`.
    """
    devices, tokens, ragged = lax.axis_size(axis), (x, experts, weights, input_weights, valid), is_ragged()
    # Use one round if the tokens do not divide into equal parts.
    few, many = (count if x.shape[0] % count == 0 else 1 for count in (2, devices))
    tile = _tile(experts.size // few, num_experts) if ragged else 1
    turn = functools.partial(_ragged_turn, tile=tile) if ragged else _turn
    turn = functools.partial(turn, apply=apply, num_experts=num_experts, axis=axis)
    each = devices if ragged else 1  # the capacity counts rows from all devices, or from each device
    # Room for the choices of a round, and for the empty rows of tiles: half a tile for each expert on average.
    choices, empty = experts.size * each // few, num_experts * (tile - 1)
    rooms = (ExpertParallel.even, ExpertParallel.room) if ragged else (ExpertParallel.room,)
    shares = [math.ceil(room * choices / devices) + int(room * empty / 2) for room in rooms]
    lengths = [LENGTH if tile > 1 and share >= LENGTH else tile for share in shares]
    rounded = [round(min(share, choices + empty) / n) * n for share, n in zip(shares, lengths, strict=True)]
    sizes = sorted({*rounded})
    usual = [functools.partial(_turns, turn, few, size) for size in sizes]
    # Room for any choice.
    worst = functools.partial(_turns, turn, many, dispatch.rounded(experts.size * each // many + empty, lengths[-1]))
    if few == devices:
        return worst(tokens)
    busiest = _of_all(_busiest(experts, valid, few, num_experts, devices, tile, axis if ragged else None))
    # All devices take the same branch (`_busiest` is a maximum over the mesh), because each branch has collectives.
    enough = sum((busiest > size).astype(jnp.int32) for size in sizes)
    return lax.switch(enough, [*usual, worst], tokens)


def is_ragged() -> bool:
    """Returns True if rows are exchanged by `ragged_all_to_all`, False if in pieces of equal size.

    The layout decides (`ExpertParallel.exchange`), or else the platform's default.

    Raises:
        ValueError: when the layout asks for it and XLA does not support it on this platform.
    """
    layout, (platform, _) = current(), current_device()
    experts = ExpertParallel() if layout is None or layout.experts is None else layout.experts
    ragged = experts.is_ragged(platform, pipelined=stages() > 1)
    if ragged and platform not in CAN_RAGGED:
        raise ValueError(
            f"tokens can travel ragged on {' and '.join(CAN_RAGGED)}, not on {platform}: leave exchange='ragged' out of "
            "sharding.ExpertParallel"
        )
    return ragged


def _tile(choices: int, num_experts: int) -> int:
    """Returns how many rows travel together: a tile if an expert's rows fill four, so that few of them are empty."""
    return TILE if choices >= 4 * TILE * num_experts else 1


def _busiest(
    experts: Int[Array, "M X"],
    valid: Bool[Array, " M"],
    turns: int,
    num_experts: int,
    devices: int,
    tile: int,
    axis: str | None,
) -> Int[Array, ""]:
    """Returns the largest number of rows that a device sends to another in a round, or receives over `axis`."""
    # [M, X] -> [turns, M * X / turns]; padding gets an id that no expert has.
    ids = jnp.where(valid[:, None], experts, num_experts).reshape(turns, -1)
    # [turns, E]: choices for each expert in each round, and [turns, devices]: rows for each device.
    chosen = jnp.sum(ids[:, :, None] == jnp.arange(num_experts)[None, None], axis=1)
    counts = dispatch.rounded(chosen, tile).reshape(turns, devices, -1).sum(axis=2)
    # Received choices are the sum over senders.
    counts = counts if axis is None else lax.psum(counts, axis)
    return lax.pmax(counts.max(), jax.sharding.get_abstract_mesh().axis_names)


@jax.custom_batching.custom_vmap
def _of_all(busiest: Int[Array, ""]) -> Int[Array, ""]:
    """Returns its argument; under vmap over pipeline stages the maximum, so that all stages take the same `cond`
    branch.

    A predicate that differs between vmapped stages would turn `cond` into a `select` that computes both branches.
    """
    return busiest


@_of_all.def_vmap
def _(stages: int, is_batched: list[bool], busiest: Int[Array, "..."]) -> tuple[Int[Array, "..."], bool]:
    return (jnp.max(busiest, axis=0) if is_batched[0] else busiest), False


def _turns(turn: Callable[..., Array], turns: int, capacity: int, tokens: Any) -> Float[Array, "M D"]:
    """Runs `turn` on equal parts of the tokens, one after the other; the backward pass recomputes each."""
    # [M, ...] -> [turns, M / turns, ...]
    cut = jax.tree.map(lambda a: a.reshape(turns, -1, *a.shape[1:]), tokens)
    run = jax.checkpoint(functools.partial(turn, capacity=capacity))
    return lax.scan(lambda _, tokens: (None, run(*tokens)), None, cut)[1].reshape(tokens[0].shape)


def _turn(x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str, capacity: int):
    """Runs one round of the dense exchange: `capacity` rows for each device, full or not."""
    here = num_experts // lax.axis_size(axis)
    # The plan treats devices as experts: expert // here is the device that owns the expert.
    there = dispatch.padded(experts // here, valid, num_experts // here, capacity=capacity)
    # [M, D] -> [devices * capacity, D], sorted by device.
    rows, factors = dispatch.weighted_rows(x, weights, input_weights, there)
    # Count experts from one: zero marks an empty row.
    numbers = (experts % here + 1).reshape(-1).at[there.source].get(mode="fill", fill_value=0)
    rows, factors, numbers = (_swap(a, axis) for a in (rows, factors, numbers))
    # Sort the received rows by this device's experts; every row is one choice.
    plan = dispatch.dropless(numbers[:, None] - 1, numbers > 0, here)
    made = dispatch.combine(apply(*dispatch.weighted_rows(rows, factors, None, plan), plan), plan)
    # Send the results back to the devices and rows that they came from.
    return dispatch.combine(_swap(made, axis), there)


def _ragged_turn(
    x, experts, weights, input_weights, valid, *, apply, num_experts: int, axis: str, capacity: int, tile: int
):
    """Runs one round of the ragged exchange: rows arrive sorted by expert in a buffer of `capacity` rows."""
    plan = dispatch.dropless(experts, valid, num_experts, tile)
    # [M, D] -> [R, D], sorted by expert and hence by device.
    rows, factors = dispatch.weighted_rows(x, weights, input_weights, plan)
    out, back, counts = _routes(plan.counts // tile, axis)
    there = tuple(_travel_in_tiles(a, out, back, axis, capacity, tile) for a in (rows, factors))
    made = apply(*there, dispatch.sorted_rows(counts * tile, capacity))
    return dispatch.combine(_travel_in_tiles(made, back, out, axis, len(rows), tile), plan)


def _travel_in_tiles(rows: Float[Array, "R D"], out: "Route", back: "Route", axis: str, size: int, tile: int):
    """Sends tiles of rows along `out` into a buffer of `size` rows, `size D`."""
    # [R, D] -> [R / tile, tile, D]. Numbers lie side by side: [R, 1] -> [R / tile, tile].
    width = rows.shape[1:] if rows.shape[1] > 1 or tile == 1 else ()
    tiles = rows.reshape(-1, *((tile,) if tile > 1 else ()), *width)
    return jnp.reshape(cast(Array, _travel(tiles, out, back, axis, size // tile)), (size, -1))


def _swap(rows, axis: str):
    """Sends part `i` of the rows to device `i`."""
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)


@pytree
class Route:
    """Slices of rows, several for each device.

    Attributes:
        start: First row of each slice on the sender.
        size: Rows of each slice.
        there: First row of each slice on the receiver.
    """

    start: Int[Array, " S"]
    size: Int[Array, " S"]
    there: Int[Array, " S"]


def _routes(counts: Int[Array, " E"], axis: str) -> tuple[Route, Route, Int[Array, " H"]]:
    """Computes the routes of rows to their experts and back.

    Rows are sorted by expert on the sender; on the receiver they are sorted by expert, then by sender.

    Args:
        counts: Rows of each expert on this device.
        axis: Mesh axis over which experts are split.

    Returns:
        The route out, the route back, and the rows that each of this device's experts receives.
    """
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    all_ = lax.all_gather(counts, axis).reshape(devices, devices, -1)  # from, to, expert
    # First rows on the sender, which are preceded by the rows of all earlier experts.
    home = _starts(all_.reshape(devices, -1)).reshape(all_.shape)
    # First rows on the receiver, ordered by (expert, sender); then back to the order (sender, receiver, expert).
    lies = jnp.moveaxis(all_, 0, 2)  # to, expert, from
    lies = jnp.moveaxis(_starts(lies.reshape(devices, -1)).reshape(lies.shape), 2, 0)
    # Slices that this device sends, and slices that it receives.
    out = Route(home[me].reshape(-1), all_[me].reshape(-1), lies[me].reshape(-1))
    back = Route(lies[:, me].reshape(-1), all_[:, me].reshape(-1), home[:, me].reshape(-1))
    return out, back, all_[:, me].sum(axis=0)


def _starts(sizes: Int[Array, "N S"]) -> Int[Array, "N S"]:
    """Returns the exclusive cumulative sum of each row: where each slice starts."""
    return jnp.cumsum(sizes, axis=1) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _travel(rows: Float[Array, "R ..."], out: Route, back: Route, axis: str, size: int) -> Float[Array, "N ..."]:
    """Sends `rows` along `out` into a buffer of `size` rows; what rows hold that receive nothing must not matter.

    The gradient is sent along `back`.
    """
    room = lax.empty((size, *rows.shape[1:]), rows.dtype)  # zeros would be a pass over the buffer
    return lax.ragged_all_to_all(rows, room, out.start, out.size, out.there, back.size, axis_name=axis)


def _travel_forward(rows, out, back, axis, size):
    return _travel(rows, out, back, axis, size), (out, back, rows.shape[0])


def _travel_backward(axis, size, residuals, d):
    out, back, rows = residuals
    return _travel(d, back, out, axis, rows), None, None


_travel.defvjp(_travel_forward, _travel_backward)
