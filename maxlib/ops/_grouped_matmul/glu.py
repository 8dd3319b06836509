"""Gated linear units, which combine a gate and an up projection, also those of each row's expert."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib._utils.rows import take_rows
from maxlib.kernels.grouped_matmul.mosaic_gpu import glu
from maxlib.kernels.grouped_matmul.rows import NAMES, only_used, owners
from maxlib.ops._axes import check_axes, require
from maxlib.ops._cost import register_flops
from maxlib.ops._dispatch import Choice
from maxlib.ops._grouped_matmul.api import GROUPED_MATMUL, ExpertWeightOrder, check_shapes, describe, grouped_matmul


def swiglu(gate: Array, up: Array) -> Array:
    """Returns `silu(gate) * up` (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    return jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """Returns `gelu(gate) * up`, the gelu approximated by tanh (GeGLU, https://arxiv.org/abs/2002.05202)."""
    return jax.nn.gelu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """SwiGLU with clipped inputs (GPT-OSS): `g * sigmoid(alpha * g) * (u + offset)`.

    DeepSeek V4's is `ClampedSwiGLU(1.0, 10.0, 0.0)`.

    Args:
        alpha: Slope of the sigmoid.
        limit: `g` is `min(gate, limit)`, and `u` is `up` clipped to `[-limit, limit]`.
        offset: Added to `u`.
    """

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + self.offset)


def grouped_glu(
    rows: Float[Array, "M I"],
    gate: Float[Array, "E O I"] | Float[Array, "E I O"] | Any,
    up: Float[Array, "E O I"] | Float[Array, "E I O"] | Any,
    rows_per_expert: Int[Array, " E"],
    *,
    activation: Callable[[Array, Array], Array] = swiglu,
    gate_bias: Float[Array, "E O"] | None = None,
    up_bias: Float[Array, "E O"] | None = None,
    weight_order: ExpertWeightOrder = "EOI",
    zero_rest: bool = True,
    implementation: str | None = None,
) -> Float[Array, "M O"]:
    """Combines two grouped matmuls of the same rows: `activation(x @ gate[e].T + gate_bias[e], x @ up[e].T +
    up_bias[e])`.

    In policies of `jax.checkpoint`, gate and up have the names "expert_gate" and "expert_up".

    Args:
        rows: Rows sorted by expert, as in `grouped_matmul`.
        gate: Matrices of the gate projection.
        up: Matrices of the up projection, of the same shape.
        rows_per_expert: Number of rows of each expert.
        activation: An elementwise function of both products, such as `ops.swiglu` or `ops.ClampedSwiGLU()`. It must be
            hashable, and map zeros to zero.
        gate_bias: Bias of the gate projection; pass both biases or neither.
        up_bias: Bias of the up projection.
        weight_order: Dimensions of `gate` and `up`, as in `grouped_matmul`.
        zero_rest: False leaves the gradients of rows beyond the experts' undefined, as in `grouped_matmul`.
        implementation: As in `grouped_matmul`, with the same default. Most compute two matmuls, rounded to the dtype of
            `rows`, and then `activation`. "mosaic_gpu" is one kernel for NVIDIA's Hopper that reads rows once and
            applies the activation in float32; if a gradient is needed, it writes gate and up, and XLA applies the
            activation. By default it runs `swiglu`, `geglu` and `ClampedSwiGLU`; it is compiled with others of
            arithmetic, min, max, exp, tanh and the logistic function.

    Returns:
        One row of outputs for each row.

    Raises:
        ValueError: When shapes do not agree, `weight_order` or `implementation` is unknown,
            or the named implementation cannot run the call.
    """
    _check(rows, gate, up, rows_per_expert, (gate_bias, up_bias), weight_order)
    choice = GROUPED_MATMUL.choose(describe(rows, gate, weight_order, None), implementation)
    biases = () if gate_bias is None else (gate_bias, up_bias)
    if choice.kernel != "mosaic_gpu" or (implementation is None and not _is_fused(activation)):
        if choice.kernel == "megablox" and not zero_rest and _is_joined(rows, gate, weight_order):
            gate, up = (w if isinstance(w, jax.Array) else w[...] for w in (gate, up))
            # [E, O, I] -> [E, 2 * O, I]
            both = jnp.concatenate([gate, up], axis=weight_order.index("O"))
            how = {"weight_order": weight_order, "implementation": implementation}
            y = grouped_matmul(rows, both, rows_per_expert, zero_rest=False, **how)
            # The mask is computed where the halves are read.
            products = [only_used(half, rows_per_expert) for half in jnp.split(y, 2, axis=1)]
        else:
            products = [
                grouped_matmul(rows, w, rows_per_expert, weight_order=weight_order, implementation=implementation)
                for w in (gate, up)
            ]
        if biases:
            products = [
                add_expert_bias(y, cast(Array, b), rows_per_expert) for y, b in zip(products, biases, strict=True)
            ]
        return activation(*map(checkpoint_name, products, NAMES))
    gate, up = (w if isinstance(w, jax.Array) else w[...] for w in (gate, up))
    counts = rows_per_expert.astype(jnp.int32)
    return _grouped_glu(
        rows, gate, up, counts, *biases, weight_order=weight_order, activation=activation, choice=choice
    )


def _is_joined(rows: Any, gate: Any, weight_order: str) -> bool:
    """Returns True if copying both matrices into one moves fewer bytes than passing the rows twice."""
    # Both passes of one matmul pass the rows about seven times less. They copy the matrices twice and split their
    # gradient once, of which each reads and writes 2 * O * I numbers an expert.
    E, O = gate.shape[0], gate.shape[weight_order.index("O")]
    return len(rows) >= 4 * E * O


def _is_fused(activation: Callable[[Array, Array], Array]) -> bool:
    """Returns True for activations with which every version of jax compiles the kernel."""
    return activation in (swiglu, geglu) or isinstance(activation, ClampedSwiGLU)


# Experts whose biases are selected row by row: a select of each takes about as long as passing a row through memory.
FEW = 8


def add_expert_bias(
    rows: Float[Array, "M O"], bias: Float[Array, "E O"], rows_per_expert: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """Adds the expert's bias to each row; rows beyond the last expert do not change.

    Args:
        rows: Rows sorted by expert.
        bias: One bias for each expert.
        rows_per_expert: Number of rows of each expert.
    """
    experts = owners(rows_per_expert, len(rows))
    if len(bias) > FEW:
        return rows + take_rows(bias, experts, 0)
    # XLA writes gathered rows, as large as the activations, to memory. Selected ones it computes where they are added.
    added = jnp.zeros_like(bias[0])
    for expert, b in enumerate(bias):
        added = jnp.where(experts[:, None] == expert, b, added)
    return rows + added


def _flops(rows, gate, *rest) -> float:
    """Counts the FLOPs of both matmuls, as if every row had an expert."""
    return 4.0 * rows.shape[0] * gate.shape[1] * gate.shape[2]


@register_flops(_flops, static=("weight_order", "activation", "choice"), name="grouped_glu")
def _grouped_glu(rows, gate, up, rows_per_expert, *biases, weight_order, activation, choice: Choice):
    return glu(rows, gate, up, rows_per_expert, biases, weight_order, activation, **choice.options)


def _check(rows, gate, up, rows_per_expert, biases, weight_order) -> None:
    op, axes, (gate_bias, up_bias) = "grouped_glu", " ".join(weight_order), biases
    check_shapes(op, rows, gate, rows_per_expert, weight_order)
    check_axes(op, gate=(gate, axes), up=(up, axes), gate_bias=(gate_bias, "E O"), up_bias=(up_bias, "E O"))
    require(op, (gate_bias is None) == (up_bias is None), "both biases must be given, or neither", "one")
