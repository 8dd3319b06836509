"""Mixture of experts: every token passes through the few gated MLPs that a router chooses for it.

Shapes: B rows, T tokens, D width, E experts, X chosen experts per token, F width of an expert, M tokens in one group.
`Dispatch` (`_expert_dispatch`) decides which row of a sorted buffer each choice occupies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from maxlib import ops
from maxlib.kernels.grouped_matmul.rows import NAMES
from maxlib.nn import _expert_dispatch as dispatch
from maxlib.nn import _expert_parallel as exchange
from maxlib.nn._context import Context
from maxlib.nn._linear import Einsum, Init, draw_key
from maxlib.nn.matmul import LowRank, Matmul, PlainMatmul
from maxlib.nn.quantized import QuantizedWeight
from maxlib.nn.router import Router, Routing, SigmoidInputRouter, expert_counts
from maxlib.ops._glu import swiglu
from maxlib.sharding import constrain, shard_map_by_name
from maxlib.sharding.layers import AllGatherArg, axis_of, axis_size, check_axes, gathers_odd_parts


@runtime_checkable
class RouterLoss(Protocol):
    """A loss on the router's decisions.

    Attributes:
        name: Name in `aux`, which begins with `loss/`.
    """

    name: str

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]: ...


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
        values, own = init(draw_key(rngs), (num_experts, *shape), jnp.float32), ("expert", *axes)
        if weight_order == "EIO":
            # [E, O, I] -> [E, I, O] after drawing, so that both orders have the same initial values.
            values, own = jnp.swapaxes(values, 1, 2), ("expert", *axes[::-1])
        self.w = nnx.Param(values, axes=own, summed=axes[1:])
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


class MoE(nnx.Module):
    """Mixture of experts: `sum over chosen experts of weight * down(activation(gate(x), up(x)))`, plus `shared(x)`.

    Experts without a gate are `down(activation(up(x)))`. With a latent width L, `x` is projected to L before the
    experts and their sum is projected back, `leave(experts(enter(x)))`; the router and the shared layer get the full
    width.

    With a capacity (GShard, arXiv:2006.16668) every expert has room for `ceil(capacity_factor * T * top_k / E)` tokens
    of each row of T tokens, padding included; tokens later in the row are dropped. If all rows have one length, no
    token's result depends on a later token or on another row. Longer rows have more room, and decoding one token at a
    time drops none.

        router = nn.Router(64, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
        moe = nn.MoE(64, 128, router=router, rngs=nnx.Rngs(1))
        y, aux = moe(jnp.ones((2, 8, 64)))  # B T D; aux["moe/load"] is each expert's share of the tokens

    Args:
        dim: Width D of the residual stream.
        mlp_dim: Width F of an expert.
        router: `Router`, `SigmoidInputRouter` or another `router(x) -> Routing` with `num_experts` and `top_k`.
        activation: Combines an expert's gate and up projections, such as `swiglu`; without a gate, a function of one
            array.
        gated: False for experts without a gate (Nemotron).
        latent_dim: Width L of the experts' inputs and outputs (Nemotron 3); None means D.
        bias: True adds biases to all three projections.
        shared: Layer applied to every token, or None.
        shared_gate: True multiplies the output of `shared` by `sigmoid(x . w)`, one number per token (Qwen2-MoE).
        capacity_factor: Capacity of an expert as a multiple of an even share; None computes every choice (dropless).
        losses: Router losses to report for training.
        weight_order: Order in which the experts' matrices are stored (`ExpertLinear`), usually that of published files.
        init: Initializer of the matrices.
        rngs: Source of initial values.

    Raises:
        ValueError: when `capacity_factor` is not positive.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        router: Router | SigmoidInputRouter | Any,
        activation: Callable[..., Array] = swiglu,
        gated: bool = True,
        latent_dim: int | None = None,
        bias: bool = False,
        shared: nnx.Module | None = None,
        shared_gate: bool = False,
        capacity_factor: float | None = None,
        losses: Sequence[RouterLoss] = (),
        weight_order: ops.ExpertWeightOrder = "EOI",
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor must be positive, or None to drop nothing, got {capacity_factor}")
        width = dim if latent_dim is None else latent_dim
        E, into, out = router.num_experts, (mlp_dim, width), (width, mlp_dim)
        self.router, self.shared = router, shared
        # One output, `...1`, which broadcasts over the width.
        self.shared_gate = Einsum("...D,ED->...E", (1, dim), ("router", "embed"), rngs=rngs) if shared_gate else None
        parts: dict[str, Any] = {"bias": bias, "weight_order": weight_order, "init": init, "rngs": rngs}
        self.gate = ExpertLinear(E, into, ("mlp", "expert_embed"), **parts) if gated else None
        self.up = ExpertLinear(E, into, ("mlp", "expert_embed"), **parts)
        self.down = ExpertLinear(E, out, ("expert_embed", "mlp"), **parts)
        latent = lambda spec, shape, axes: None if latent_dim is None else Einsum(spec, shape, axes, rngs=rngs)
        self.enter = latent("...D,LD->...L", (width, dim), ("rank", "embed"))
        self.leave = latent("...L,DL->...D", (dim, width), ("embed", "rank"))
        self.activation, self.capacity_factor, self.losses = activation, capacity_factor, tuple(losses)
        self.weight_order: ops.ExpertWeightOrder = weight_order

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, *, routed_by: Float[Array, "B T D"] | None = None
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Applies the chosen experts to every token.

        Padding (`ctx.valid`) is sent to no expert and is not counted.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers; None means that every token is real.
            routed_by: Input of the router if it differs from `x` (Gemma 4 normalizes it differently); None means `x`.

        Returns:
            The output, `B T D`, and arrays by name: the router's losses; `moe/load`, each expert's share of the choices
            before any is dropped; `moe/counts`, how often each was chosen; with a capacity `moe/dropped`, the share of
            dropped choices.

        Raises:
            ValueError: when `x` is not of shape `B T D`.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be rows of tokens `B T D`, got x of shape {x.shape}; one row is x[None]")
        valid = None if ctx is None else ctx.valid
        routing = self.router(x if routed_by is None else routed_by)
        # [B, T, D] -> [B, T, L]
        h = x if self.enter is None else self.enter(x)
        y, kept = self._mix(h, routing, jnp.ones(x.shape[:2], bool) if valid is None else valid)
        y = self._add_output_bias(y, routing, kept)
        # [B, T, L] -> [B, T, D], applied once to the sum over experts
        y = y if self.leave is None else self.leave(y)
        return y if self.shared is None else y + self._shared(x), self._aux(routing, valid, kept)

    def _shared(self, x):
        """Applies the shared layer and its gate."""
        y = cast(Any, self.shared)(x)
        return y if self.shared_gate is None else y * jax.nn.sigmoid(self.shared_gate(x))

    def capacity(self, seq: int) -> int | None:
        """Returns how many tokens of a row of `seq` tokens an expert processes; None means all."""
        if self.capacity_factor is None:
            return None
        # T * X choices over E experts, times the factor.
        even = self.capacity_factor * seq * self.router.top_k / self.router.num_experts
        return min(seq, math.ceil(even))

    def _mix(self, x, routing: Routing, valid):
        """Returns the weighted sum without the output bias, `B T D`, and a mask of the computed choices, `B T X`.

        Each device computes its own rows.
        """
        capacity = self.capacity(x.shape[1])
        # A capacity counts tokens of whole rows, so it needs unsplit sequences.
        E, tokens = self.router.num_experts, ("batch", "seq" if capacity is None else None)
        # The mesh axis over which experts are split and tokens are exchanged; None if experts are not split.
        axis = axis_of("act_expert") if E % axis_size("act_expert") == 0 else None
        rows, biased = (*tokens, None), ("act_expert", "mlp")
        # Without a gate, only up.
        into = [m for m in (self.gate, self.up) if m is not None]
        parts = (*into, self.down)
        matrices = [_matrices(m, "I" if m is self.down else "O", x.dtype) for m in parts]
        w, tree = jax.tree.flatten([m.values for m in matrices])
        b = [None if m.b is None else jnp.asarray(m.b[...], x.dtype) for m in into]
        # An adapter has arrays, so it is passed along with the matrices.
        matmuls = tuple(None if isinstance(m.matmul, LowRank) else m.matmul for m in parts)
        how = {"activation": self.activation, "weight_orders": (matrices[0].weight_order, matrices[-1].weight_order)}
        options = {**how, "capacity": capacity, "num_experts": E, "axis": axis}
        run = functools.partial(_run, matmuls=matmuls, tree=tree, **options)
        split = [names for m in matrices for names in m.names]
        # shard_map takes flat arguments, with one tuple of axis names for each array, in the order of the call below:
        #   x, experts, weights, input_weights   rows      [B, T, ...]
        #   valid                                tokens    [B, T]
        #   b: biases of gate and up             biased    [E, F]
        #   w: arrays of gate, up and down       split     (also a quantized one's scales, an adapted one's factors)
        # If the width F is split, each device returns its part of the sum on a new first axis "mlp".
        names = [rows, rows, rows, rows, tokens, *[biased] * len(into), *split]
        mapped = shard_map_by_name(run, names, (("mlp", *rows), rows))
        # [1 or number of parts of F, B, T, D] -> [B, T, D]
        y, kept = mapped(x, routing.experts, routing.weights, routing.input_weights, valid, *b, *w)
        return y.sum(axis=0), kept

    def _add_output_bias(self, y, routing: Routing, kept):
        """Adds the weighted biases of the down projections.

        This runs outside the shard_map, in which every device with a part of the width would add the bias again.
        """
        if self.down.b is None:
            return y
        weights = jnp.where(kept, routing.weights, 0)
        # [B, T, X] -> [B, T, E]: each token's weight for every expert.
        share = jnp.einsum("...X,...XE->...E", weights, jax.nn.one_hot(routing.experts, self.router.num_experts))
        return y + jnp.einsum("...E,ED->...D", share.astype(y.dtype), jnp.asarray(self.down.b[...], y.dtype))

    def _aux(self, routing: Routing, valid, kept) -> dict[str, Array]:
        """Returns losses and metrics by name."""
        # [E]: choices of real tokens; `kept` counts the computed ones.
        counts = expert_counts(routing.experts, valid, self.router.num_experts)
        total = jnp.maximum(counts.sum(), 1)
        aux = {loss.name: loss(routing, valid) for loss in self.losses} | {"moe/load": counts / total}
        # Counts can be added over microbatches; shares cannot, because microbatches have different numbers of tokens.
        aux["moe/counts"] = counts
        if self.capacity_factor is not None:
            aux["moe/dropped"] = jnp.maximum(counts.sum() - kept.sum(), 0) / total
        return aux

    def reference(self, x: Float[Array, "B T D"], ctx: Context | None = None) -> Float[Array, "B T D"]:
        """Computes the output of a dropless call by a plain loop in which every expert computes every token (the
        specification).
        """
        routing, inputs = self.router(x), x if self.enter is None else self.enter(x)

        def add(y, expert):
            e, gate, up, down = expert
            chosen = routing.experts == e
            chosen = chosen if ctx is None or ctx.valid is None else chosen & ctx.valid[..., None]
            # [B, T, X] -> [B, T, 1]: this expert's weight for each token, 0 if it was not chosen.
            total = lambda values: jnp.where(chosen, values, 0).sum(axis=-1, keepdims=True)
            scaled = inputs
            if routing.input_weights is not None:
                scaled = (total(routing.input_weights) * inputs).astype(x.dtype)
            h = self.activation(*(part.one(scaled) for part in (gate, up) if part is not None))
            return y + (total(routing.weights) * down.one(h)).astype(x.dtype), None

        experts = (jnp.arange(self.router.num_experts), self.gate, self.up, self.down)
        # One expert at a time: a scan over the leading axis E of the three matrices.
        y = jax.lax.scan(add, jnp.zeros_like(inputs), experts)[0]
        y = y if self.leave is None else self.leave(y)
        return y if self.shared is None else y + self._shared(x)


class _Matrices(NamedTuple):
    """Matrices to multiply with and their adapter, the axis names of each array, and the order of their dimensions."""

    values: Any
    names: list[Any]
    weight_order: ops.ExpertWeightOrder


def _matrices(linear: ExpertLinear, split: str, dtype: Any) -> _Matrices:
    """Returns the matrices of `linear`, whose dimension `split` is divided over devices.

    If a device would gather parts of the last dimension, they are transposed first: kernels read whole rows of a
    matrix, so the compiler would otherwise copy everything after gathering.
    """
    names = {"E": "act_expert", split: "mlp"}
    wanted = tuple(names.get(letter) for letter in linear.weight_order)
    w = _placed(linear.stored(dtype), linear.w)
    adapter, names = _adapter(linear)
    split_names = _names(w, linear.w, wanted)
    if not (isinstance(split_names[0], AllGatherArg) and gathers_odd_parts(split_names[0], linear.w.shape)):
        return _Matrices((w, adapter), split_names + names, linear.weight_order)
    turn = lambda names: (names[0], names[2], names[1])
    turned = AllGatherArg(turn(split_names[0].kept), turn(split_names[0].wanted))
    return _Matrices(
        (jnp.swapaxes(w, 1, 2), adapter), [turned, *names], "EIO" if linear.weight_order == "EOI" else "EOI"
    )


def _adapter(linear: ExpertLinear) -> tuple[LowRank | None, list[Any]]:
    """Returns the adapter of `linear`, if it has one, and the axis names of each of its arrays."""
    if not isinstance(linear.matmul, LowRank):
        return None, []
    adapter, wanted = linear.matmul.with_gain(linear.w), {"expert": "act_expert", "mlp": "mlp"}
    variables = jax.tree.leaves(adapter, is_leaf=lambda x: isinstance(x, nnx.Variable))
    axes = [v.get_metadata()["axes"] for v in variables]
    return adapter, [AllGatherArg(names, tuple(wanted.get(name) for name in names)) for names in axes]


def _placed(w: Any, weight: Any) -> Any:
    """Constrains the cast weight to its sharding, so that devices exchange it in the compute dtype.

    This halves the communication of a float32 weight and of its gradient.
    """
    return constrain(w, *weight.get_metadata()["axes"]) if isinstance(w, jax.Array) else w  # else quantized


def _names(w: Any, weight: Any, names: tuple) -> list[Any]:
    """Returns the axis names of each array of `w`; a quantized weight has scales too, of size 1 along some axes."""
    if isinstance(w, jax.Array):
        return [AllGatherArg(weight.get_metadata()["axes"], names)]
    return [tuple(None if n == 1 else name for n, name in zip(a.shape, names, strict=True)) for a in jax.tree.leaves(w)]


def _run(
    x,
    experts,
    weights,
    input_weights,
    valid,
    *rest,
    activation,
    weight_orders,
    capacity,
    matmuls,
    tree,
    num_experts: int,
    axis,
):
    """Applies one device's experts.

    Without a capacity all its tokens are one group; with a capacity each row is a group.
    """
    # shard_map's arguments are flat: the biases of all but the last matrix, then the leaves of the matrices and
    # adapters.
    into = len(matmuls) - 1
    biases, matrices = rest[:into], jax.tree.unflatten(tree, rest[into:])
    parts = zip(matmuls, matrices, (*biases, None), strict=True)
    linears = [(matmul or adapter, w, b) for matmul, (w, adapter), b in parts]
    apply = functools.partial(_apply, linears=linears, activation=activation, weight_orders=weight_orders)
    split = {"apply": apply, "num_experts": num_experts, "axis": axis}
    if capacity is not None:
        y, kept = _run_rows(x, experts, weights, input_weights, valid, capacity=capacity, **split)
    else:
        # [B, T, ...] -> [B * T, ...]
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, experts, weights, input_weights, valid))
        y, kept = _run_all(*flat, **split)
    # The leading 1 becomes the axis of partial sums over the parts of the width.
    return y.reshape(1, *x.shape), kept.reshape(experts.shape)


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
    own = dataclasses.replace(jax.tree.map(lambda a: a[0], plan), num_experts=held)

    def here(rows):
        return apply(rows.reshape(-1, rows.shape[-1]), own).reshape(rows.shape)

    # [B, T, D] -> [B, E * capacity, D]; sent to the experts and back.
    rows = exchange.with_capacity(jax.vmap(_rows)(x, input_weights, plan), here, num_experts=num_experts, axis=axis)
    return jax.vmap(_weighted)(rows, weights, plan, x)


def _mixed(x, weights, input_weights, plan: dispatch.Dispatch, apply):
    """Sends tokens to their experts, applies them, and returns the weighted sum and the mask of kept choices."""
    # [M, D] -> [R, D] -> [R, D] -> [M, D]
    return _weighted(apply(_rows(x, input_weights, plan), plan), weights, plan, x)


def _rows(x, input_weights, plan: dispatch.Dispatch):
    """Returns the rows of a plan, `R D`: the token of each choice, scaled by the router's input weights if any."""
    rows = dispatch.spread(x, plan)
    if input_weights is None:
        return rows
    return (rows * dispatch.spread_choices(input_weights, plan)).astype(x.dtype)


def _apply(rows, plan: dispatch.Dispatch, *, linears, activation, weight_orders):
    """Applies the experts to the rows of a plan: `down(activation(gate(rows), up(rows)))`, or without gate."""
    (*gate, up, down), (into, out) = linears, weight_orders
    if gate:
        return plan.linear(plan.gated(rows, gate[0], up, activation, into), down, out)
    return plan.linear(activation(checkpoint_name(plan.linear(rows, up, into), NAMES[1])), down, out)


def _weighted(rows, weights, plan: dispatch.Dispatch, x):
    """Returns `sum_x weights[m, x] * rows[row_of_choice[m, x]]` and the mask of kept choices."""
    # [R, D] -> [M, X, D] -> [M, D]. A dropped choice has the weight 0.
    y = jnp.einsum("MXD,MX->MD", dispatch.collect(rows, plan), jnp.where(plan.kept, weights, 0))
    return y.astype(x.dtype), plan.kept
