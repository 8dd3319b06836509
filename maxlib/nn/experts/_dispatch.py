"""Dispatch of tokens to experts and back. A *choice* is one of the X experts of one token: number `token * X + k`.

Tokens are copied into a buffer of R rows in which the rows of an expert are adjacent. Example with M = 3 tokens, X = 1,
E = 2, `experts = [1, 0, 1]`: the rows hold tokens 1, 0, 2, so `source = [1, 0, 2]`, `row_of_choice = [1, 0, 2]` and
`counts = [1, 2]`. Shapes: M tokens, X choices, E experts, C capacity, R rows, D width, I inputs and O outputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops
from maxlib.kernels.grouped_matmul.rows import NAMES
from maxlib.nn._pytree import pytree
from maxlib.nn.matmul import Matmul, PlainMatmul
from maxlib.ops import add_expert_bias

Linear = tuple[Matmul, Any, Float[Array, "E O"] | None]
"""What multiplies, the experts' matrices and their biases."""


@pytree
class Plan:
    """Which choice each row of a buffer holds; the rows of an expert are adjacent.

    Attributes:
        source: The choice that each row holds, `M * X` in an empty row.
        row_of_choice: The row that holds each choice, `R` (no row) for a choice of padding.
        counts: Rows of each expert.
    """

    source: Int[Array, " R"]
    row_of_choice: Int[Array, "M X"]
    counts: Int[Array, " E"]

    def linear(self, rows: Float[Array, "R I"], linear: Linear, weight_order: ops.ExpertWeightOrder):
        """Multiplies each row by the matrix of its expert, `R I -> R O`, and adds the bias if there is one."""
        matmul, w, b = linear
        y = matmul.grouped(rows, w, self.counts, weight_order)
        return y if b is None else add_expert_bias(y, b, self.counts)

    def last(self, rows: Float[Array, "R I"], linear: Linear, weight_order: ops.ExpertWeightOrder):
        """Returns what `linear` does; what empty rows of the result hold must not matter."""
        matmul, w, b = linear
        if not isinstance(matmul, PlainMatmul) or b is not None:
            return self.linear(rows, linear, weight_order)
        how = {"weight_order": weight_order, "implementation": matmul.implementation}
        return ops.grouped_matmul(rows, w, self.counts, zero_rest=False, **how)

    def gated(
        self,
        rows: Float[Array, "R I"],
        gate: Linear,
        up: Linear,
        activation: Callable,
        weight_order: ops.ExpertWeightOrder,
    ):
        """Returns `activation(gate(rows), up(rows))`; one fused op if both matmuls are plain and equal."""
        (matmul, w, b), (other, w_up, b_up) = gate, up
        if not isinstance(matmul, PlainMatmul) or matmul != other:
            # Remat policies call the products `NAMES`.
            products = (self.linear(rows, linear, weight_order) for linear in (gate, up))
            return activation(*map(checkpoint_name, products, NAMES))
        how = {"weight_order": weight_order, "implementation": matmul.implementation, "zero_rest": False}
        return ops.grouped_glu(rows, w, w_up, self.counts, activation=activation, gate_bias=b, up_bias=b_up, **how)


def dropless(experts: Int[Array, "M X"], valid: Bool[Array, " M"], num_experts: int, tile: int = 1) -> Plan:
    """Makes the plan that computes every choice of valid tokens.

    Args:
        experts: Ids of the chosen experts.
        valid: False for padding.
        num_experts: Number of experts.
        tile: Each expert has a multiple of so many rows; the last ones may be empty. Rows are a multiple of it too.
    """
    order, row_of_choice, counts = _sort(experts, valid, num_experts)
    if tile > 1:
        order, row_of_choice, counts = _in_tiles(order, counts, tile)
    return Plan(order, jnp.where(valid[:, None], row_of_choice.reshape(experts.shape), len(order)), counts)


def _in_tiles(order, counts, tile: int):
    """Moves sorted choices apart so that each expert begins at a multiple of `tile` rows; results as of `_sort`."""
    size, in_tiles = order.size, rounded(counts, tile)
    index = jnp.arange(size, dtype=jnp.int32)
    # Every earlier expert moves a choice by its empty rows: [M * X, E] -> [M * X]
    is_earlier = index[:, None] >= jnp.cumsum(counts)[None]
    row = index + jnp.sum(jnp.where(is_earlier, (in_tiles - counts)[None], 0), axis=1, dtype=jnp.int32)
    # At most `tile - 1` empty rows for each expert.
    empty = jnp.full((size + len(counts) * (tile - 1)) // tile * tile, size, jnp.int32)
    source = empty.at[row].set(order, mode="drop", unique_indices=True)
    return source, jnp.zeros_like(order).at[order].set(row, unique_indices=True), in_tiles


def rounded(counts: Any, tile: int) -> Any:
    """Rounds a number or an array of counts up to multiples of `tile`."""
    return -(-counts // tile) * tile


def sorted_rows(counts: Int[Array, " E"], size: int) -> Plan:
    """Makes the plan for `size` rows that are already sorted by expert, `counts` rows each; the rest belong to no
    expert.
    """
    order = jnp.arange(size, dtype=jnp.int32)
    return Plan(order, order[:, None], counts)


def padded(experts: Int[Array, "M X"], valid: Bool[Array, " M"], num_experts: int, capacity: int) -> Plan:
    """Makes the plan with `capacity` rows for each expert, which must be enough.

    Args:
        experts: Ids of the chosen experts.
        valid: False for padding.
        num_experts: Number of experts.
        capacity: Rows of each expert.
    """
    _, row_of_choice, counts = _sort(experts, valid, num_experts)
    # First sorted row of each expert, [E]; `rank` is the index of a choice among those of its expert, [M, X].
    first = jnp.cumsum(counts) - counts
    rank = row_of_choice.reshape(experts.shape) - first[experts]
    size = num_experts * capacity
    # Row of a choice: the first row of its expert plus its rank; `size` for a choice of padding.
    row_of_choice = jnp.where(valid[:, None] & (rank < capacity), experts * capacity + rank, size)
    empty = jnp.full(size, experts.size, jnp.int32)
    # Inverse of `row_of_choice`: scatters the number of each choice into its row; rows beyond the end are dropped.
    source = empty.at[row_of_choice.reshape(-1)].set(jnp.arange(experts.size, dtype=jnp.int32), mode="drop")
    return Plan(source, row_of_choice, jnp.full(num_experts, capacity, jnp.int32))


def _sort(experts, valid, num_experts: int):
    """Sorts choices by expert.

    Returns:
        The choices in the order of their experts, the row of each choice in that order, and the count of each expert.
    """
    # Padding gets an id above all experts, so that it sorts last. [M, X] -> [M * X]
    ids = jnp.where(valid[:, None], experts, num_experts).reshape(-1)
    # Stable: tokens keep their order within an expert.
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    # Inverse permutation: row_of_choice[order[i]] = i.
    row_of_choice = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    # Compare with every expert's id, [M * X, E] -> [E]; padding matches none.
    counts = jnp.sum(ids[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return order, row_of_choice, counts


def spread(x: Float[Array, "M D"], plan: Plan) -> Float[Array, "R D"]:
    """Returns the token of each row of the plan; what an empty row holds must not matter."""
    return _pick(x, _token(plan), plan.row_of_choice)


def combine(rows: Float[Array, "R D"], plan: Plan) -> Float[Array, "M D"]:
    """Returns the sum of the rows of each token; a choice without a row counts as zeros. The transpose of `spread`."""
    return _sum(rows, plan.row_of_choice, _token(plan))


def spread_choices(x: Float[Array, "M X"], plan: Plan) -> Float[Array, "R 1"]:
    """Returns the value of the choice of each row of the plan, 0 for an empty row."""
    picked = _pick(x.reshape(-1, 1), plan.source, plan.row_of_choice.reshape(-1, 1))
    return jnp.where((plan.source < x.size)[:, None], picked, 0)


def weighted_rows(x, weights, input_weights, plan: Plan) -> tuple[Float[Array, "R D"], Float[Array, "R 1"]]:
    """Returns the token of each row, scaled by the router's input weights if any, and the weight of its result."""
    rows = spread(x, plan)
    if input_weights is not None:
        rows = (rows * spread_choices(input_weights, plan)).astype(x.dtype)
    return rows, spread_choices(weights, plan)


def _token(plan: Plan) -> Int[Array, " R"]:
    # choice // X is the token
    return plan.source // plan.row_of_choice.shape[1]


# A gather of rows and a sum of rows are each other's gradients. The transpose of a gather would be a scatter-add, which
# is slow on accelerators. N inputs, R rows, K rows of an input.
@jax.custom_vjp
def _pick(x: Float[Array, "N D"], index: Int[Array, " R"], back: Int[Array, "N K"]) -> Float[Array, "R D"]:
    """Returns `x[index]`, the last one where the index is out of range: a mask would be a pass over all rows."""
    return x.at[index].get(mode="clip")


@jax.custom_vjp
def _sum(rows: Float[Array, "R D"], back: Int[Array, "N K"], index: Int[Array, " R"]) -> Float[Array, "N D"]:
    """Returns `rows[back].sum(axis=1)`, summed in float32, with zeros where `back` is out of range."""
    picked = rows.at[back].get(mode="fill", fill_value=0)
    return picked.sum(axis=1, dtype=jnp.promote_types(rows.dtype, jnp.float32)).astype(rows.dtype)


_pick.defvjp(
    lambda x, index, back: (_pick(x, index, back), (index, back)),
    lambda indices, d: (_sum(d, indices[1], indices[0]), None, None),
)
_sum.defvjp(
    lambda rows, back, index: (_sum(rows, back, index), (index, back)),
    lambda indices, d: (_pick(d, *indices), None, None),
)
