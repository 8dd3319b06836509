"""The linear layers of all experts, and their matrices as each device multiplies by them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.nn._initial_values import Init, truncated_normal
from maxlib.nn._linear import draw_key
from maxlib.nn.matmul import LowRank, Matmul, PlainMatmul
from maxlib.nn.quantized import QuantizedWeight
from maxlib.sharding import constrain
from maxlib.sharding.layers import AllGatherArg, check_axes, gathers_odd_parts


class ExpertLinear(nnx.Module):
    """Linear layers of all experts: a matrix, and optionally a bias, for each. `MoE` applies them.

    Args:
        num_experts: Number E of experts.
        shape: Outputs and inputs of a matrix, `(O, I)`.
        axes: Names of these two dimensions for sharding rules.
        bias: True adds a bias, `E O`.
        weight_order: Order in which the matrices are stored, `EOI` or `EIO`; initial values are the same either way.
        init: Initializer of shape `E O I`, by default truncated normal with variance 1 / I.
        rngs: Source of initial values.

    Raises:
        ValueError: when an axis name is not declared (`sharding.declare_axes`).
    """

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        bias: bool = False,
        weight_order: ops.ExpertWeightOrder = "EOI",
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        check_axes(axes, "ExpertLinear")
        if init is None:
            # batch_axis=0: the fan-in of one expert, without the expert axis.
            init = nnx.initializers.variance_scaling(
                1.0, "fan_in", "truncated_normal", in_axis=2, out_axis=1, batch_axis=0
            )
            init = truncated_normal(shape[1], init)
        values, stored_axes = init(draw_key(rngs), (num_experts, *shape), jnp.float32), ("expert", *axes)
        if weight_order == "EIO":
            # [E, O, I] -> [E, I, O] after drawing, so that both orders have the same initial values.
            values, stored_axes = jnp.swapaxes(values, 1, 2), ("expert", *axes[::-1])
        self.w = nnx.Param(values, axes=stored_axes, summed=axes[1:])
        self.b = nnx.Param(jnp.zeros((num_experts, shape[0])), axes=("expert", axes[0])) if bias else None
        self.matmul: Matmul = PlainMatmul()
        self.weight_order: ops.ExpertWeightOrder = weight_order

    def stored(self, dtype: Any) -> Array | QuantizedWeight:
        """Returns the matrices to multiply by: cast to `dtype`, or unchanged if they are quantized."""
        return self.w if isinstance(self.w, QuantizedWeight) else jnp.asarray(self.w[...], dtype)

    def one(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        """Applies a single expert, whose parameters have no expert axis, to `x`."""
        y = self.matmul.einsum(f"BTI,{self.weight_order[1:]}->BTO", x, self.w)
        return y if self.b is None else y + jnp.broadcast_to(jnp.asarray(self.b[...], x.dtype), y.shape)


class ExpertMatrices(NamedTuple):
    """Matrices to multiply with and their adapter, the axis names of each array, and the order of their dimensions."""

    values: Any
    names: list[Any]
    weight_order: ops.ExpertWeightOrder


def expert_matrices(linear: ExpertLinear, split: str, dtype: Any) -> ExpertMatrices:
    """Returns the matrices of `linear`, whose dimension `split` is divided over devices.

    If a device would gather parts of the last dimension, they are transposed first: kernels read whole rows of a
    matrix, so the compiler would otherwise copy everything after gathering.
    """
    split_axes = {"E": "act_expert", split: "mlp"}
    wanted = tuple(split_axes.get(letter) for letter in linear.weight_order)
    w = _resharded(linear.stored(dtype), linear.w)
    adapter, adapter_names = _adapter(linear)
    first, *of_scales = _axis_names(w, linear.w, wanted)
    if not (isinstance(first, AllGatherArg) and gathers_odd_parts(first, linear.w.shape)):
        return ExpertMatrices((w, adapter), [first, *of_scales, *adapter_names], linear.weight_order)
    # [E, O, I] -> [E, I, O], or the other way round
    (E, O, I), (to_E, to_O, to_I) = first.kept, first.wanted
    first = AllGatherArg((E, I, O), (to_E, to_I, to_O))
    order = "EIO" if linear.weight_order == "EOI" else "EOI"
    return ExpertMatrices((jnp.swapaxes(w, 1, 2), adapter), [first, *adapter_names], order)


def _adapter(linear: ExpertLinear) -> tuple[LowRank | None, list[Any]]:
    """Returns the adapter of `linear`, if it has one, and the axis names of each of its arrays."""
    if not isinstance(linear.matmul, LowRank):
        return None, []
    adapter, wanted = linear.matmul.with_gain(linear.w), {"expert": "act_expert", "mlp": "mlp"}
    variables = jax.tree.leaves(adapter, is_leaf=lambda x: isinstance(x, nnx.Variable))
    axes = [v.get_metadata()["axes"] for v in variables]
    return adapter, [AllGatherArg(names, tuple(wanted.get(name) for name in names)) for names in axes]


def _resharded(w: Any, weight: Any) -> Any:
    """Constrains the cast weight to its sharding, so that devices exchange it in the compute dtype.

    This halves the communication of a float32 weight and of its gradient.
    """
    return constrain(w, *weight.get_metadata()["axes"]) if isinstance(w, jax.Array) else w  # else quantized


def _axis_names(w: Any, weight: Any, names: tuple) -> list[Any]:
    """Returns the axis names of each array of `w`; a quantized weight has scales too, of size 1 along some axes."""
    if isinstance(w, jax.Array):
        return [AllGatherArg(weight.get_metadata()["axes"], names)]
    return [tuple(None if n == 1 else name for n, name in zip(a.shape, names, strict=True)) for a in jax.tree.leaves(w)]
