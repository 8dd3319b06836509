"""Moving tokens to their experts and back. A *choice* is one of the X experts of one token: number `token * X + k`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops
from maxlib.nn._pytree import pytree, static
from maxlib.nn.matmul import Exact, Matmul
from maxlib.ops._glu import NAMES
from maxlib.ops._grouped_matmul.glu import add_bias

Linear = tuple[Matmul, Any, Float[Array, "E O"] | None]
"""What multiplies, the experts' matrices and their biases."""


@pytree
class Dropless:
    """All choices, sorted by expert; those of padding come last and belong to none."""

    source: Int[Array, " R"]
    """The choice that each row holds."""
    place: Int[Array, "M X"]
    """The row that holds each choice."""
    kept: Bool[Array, "M X"]
    """Which choices are computed."""
    counts: Int[Array, " E"]

    def linear(self, rows: Float[Array, "R I"], linear: Linear, layout: ops.Layout):
        matmul, w, b = linear
        y = matmul.grouped(rows, w, self.counts, layout)
        return y if b is None else add_bias(y, b, self.counts)

    def gated(self, rows: Float[Array, "R I"], gate: Linear, up: Linear, activation: Callable, layout: ops.Layout):
        """Both projections, joined: by one op if both matmuls are exact and the same."""
        (matmul, w, b), (other, w_up, b_up) = gate, up
        if not isinstance(matmul, Exact) or matmul != other:
            return _gated(self, rows, gate, up, activation, layout)
        how = {"layout": layout, "implementation": matmul.implementation}
        return ops.grouped_glu(rows, w, w_up, self.counts, activation=activation, gate_bias=b, up_bias=b_up, **how)


@pytree
class Padded:
    """`capacity` rows for each expert, filled in the order of the tokens; what does not fit has no place (`R`)."""

    source: Int[Array, " R"]
    """The choice that each row holds, `M * X` in an empty one."""
    place: Int[Array, "M X"]
    kept: Bool[Array, "M X"]
    num_experts: int = static()

    def linear(self, rows: Float[Array, "R I"], linear: Linear, layout: ops.Layout):
        matmul, w, b = linear
        y = matmul.einsum(f"ECI,{layout}->ECO", rows.reshape(self.num_experts, -1, rows.shape[-1]), w)
        return (y if b is None else y + jnp.expand_dims(b, 1)).reshape(rows.shape[0], -1)

    def gated(self, rows: Float[Array, "R I"], gate: Linear, up: Linear, activation: Callable, layout: ops.Layout):
        return _gated(self, rows, gate, up, activation, layout)


Plan = Dropless | Padded


def _gated(plan: Plan, rows, gate: Linear, up: Linear, activation: Callable, layout: ops.Layout):
    return activation(*map(checkpoint_name, (plan.linear(rows, linear, layout) for linear in (gate, up)), NAMES))


def dropless(experts: Int[Array, "M X"], valid: Bool[Array, " M"], num_experts: int) -> Dropless:
    order, place, counts = _sort(experts, valid, num_experts)
    kept = jnp.broadcast_to(valid[:, None], experts.shape)
    return Dropless(order, place.reshape(experts.shape), kept, counts)


def sorted_rows(counts: Int[Array, " E"], size: int) -> Dropless:
    """Of `size` rows that lie sorted by expert already; what is behind the last one belongs to none."""
    order = jnp.arange(size, dtype=jnp.int32)
    return Dropless(order, order[:, None], (order < counts.sum())[:, None], counts)


def padded(experts: Int[Array, "M X"], valid: Bool[Array, " M"], num_experts: int, capacity: int) -> Padded:
    order, place, counts = _sort(experts, valid, num_experts)
    first = jnp.cumsum(counts) - counts
    rank = place.reshape(experts.shape) - first[experts]
    kept = valid[:, None] & (rank < capacity)
    size = num_experts * capacity
    place = jnp.where(kept, experts * capacity + rank, size)
    empty = jnp.full(size, experts.size, order.dtype)
    source = empty.at[place.reshape(-1)].set(jnp.arange(experts.size, dtype=order.dtype), mode="drop")
    return Padded(source, place, kept, num_experts)


def _sort(experts, valid, num_experts: int):
    """Choices in the order of their experts, the place of each in that order, and how many each expert has."""
    ids = jnp.where(valid[:, None], experts, num_experts).reshape(-1)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    counts = jnp.sum(ids[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return order, place, counts


def spread(x: Float[Array, "M D"], plan: Plan) -> Float[Array, "R D"]:
    """A row for each choice that the plan holds: its token."""
    return _pick(x, plan.source // plan.place.shape[1], plan.place)


def spread_choices(x: Float[Array, "M X"], plan: Plan) -> Float[Array, "R 1"]:
    """A row for each choice that the plan holds: its own value."""
    return _pick(x.reshape(-1, 1), plan.source, plan.place.reshape(-1, 1))


def collect(rows: Float[Array, "R D"], plan: Plan) -> Float[Array, "M X D"]:
    """The row of each choice; zeros for one that has none."""
    z = _pick(rows, plan.place.reshape(-1), plan.source[:, None])
    return z.reshape(*plan.place.shape, rows.shape[-1])


@jax.custom_vjp
def _pick(x: Float[Array, "N D"], index: Int[Array, " R"], back: Int[Array, "N K"]) -> Float[Array, "R D"]:
    """`x[index]`, zeros where there is no such row. `back` says where each row of `x` went: the gradient is a gather,
    too.
    """
    return x.at[index].get(mode="fill", fill_value=0)


def _pick_forward(x, index, back):
    return _pick(x, index, back), back


def _pick_backward(back, d):
    rows = d.at[back].get(mode="fill", fill_value=0)
    return rows.sum(axis=1, dtype=jnp.promote_types(d.dtype, jnp.float32)).astype(d.dtype), None, None


_pick.defvjp(_pick_forward, _pick_backward)
