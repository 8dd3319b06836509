"""Mixture of experts: every token passes through the few gated MLPs that a router chooses for it.

Shapes: B rows, T tokens, D width, E experts, X chosen experts per token, F width of an expert, L latent
width, R rows in a sorted buffer, M tokens in one group.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops
from maxlib.kernels.grouped_matmul.rows import NAMES
from maxlib.nn._initial_values import Init
from maxlib.nn._linear import Einsum
from maxlib.nn.decoder._context import Context, check_is_rows
from maxlib.nn.experts import _dispatch as dispatch
from maxlib.nn.experts import _parallel as exchange
from maxlib.nn.experts._linear import ExpertLinear, expert_matrices
from maxlib.nn.matmul import LowRank, Matmul
from maxlib.nn.router import Router, Routing, SigmoidInputRouter, expert_counts
from maxlib.ops import swiglu
from maxlib.sharding import shard_map_by_name
from maxlib.sharding.layers import AllGatherArg, axis_of, axis_size


@runtime_checkable
class RouterLoss(Protocol):
    """A loss on the router's decisions.

    Attributes:
        name: Name in `aux`, which begins with `loss/`.
    """

    name: str

    def __call__(self, routing: Routing, ctx: Context | None) -> Float[Array, ""]:
        """Returns the loss of one layer.

        Args:
            routing: The router's decisions.
            ctx: Documents and padding; None means that every row is one document.
        """
        ...


def takes_tokens(router: Any) -> bool:
    """Returns True if a router decides by the ids of tokens."""
    return getattr(router, "takes_tokens", False)


class MoE(nnx.Module):
    """Mixture of experts: `sum over chosen experts of weight * down(activation(gate(x), up(x)))`, plus `shared(x)`.

    Experts without a gate are `down(activation(up(x)))`. With a latent width L, `x` is projected to L before the
    experts and their sum is projected back, `leave(experts(enter(x)))`; the router and the shared layer get the full
    width.

        router = nn.Router(64, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
        moe = nn.MoE(64, 128, router=router, rngs=nnx.Rngs(1))
        y, aux = moe(jnp.ones((2, 8, 64)))  # B T D; aux["moe/load"] is each expert's share of the tokens

    Args:
        dim: Width D of the residual stream.
        mlp_dim: Width F of an expert.
        router: `Router`, `SigmoidInputRouter` or another `router(x) -> Routing` with `num_experts` and `top_k`; one
            with `takes_tokens` is called as `router(x, ctx.tokens)`.
        activation: Combines an expert's gate and up projections, such as `swiglu`; without a gate, a function of one
            array.
        gated: False for experts without a gate (Nemotron).
        latent_dim: Width L of the experts' inputs and outputs (Nemotron 3); None means D.
        bias: True adds biases to all three projections.
        shared: Layer applied to every token, or None.
        shared_gate: True multiplies the output of `shared` by `sigmoid(x . w)`, one number per token (Qwen2-MoE).
        losses: Router losses to report for training.
        weight_order: Order in which the experts' matrices are stored (`ExpertLinear`), usually that of published files.
        init: Initializer of the matrices.
        rngs: Source of initial values.

    Raises:
        TypeError: when `router` is not a router.
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
        losses: Sequence[RouterLoss] = (),
        weight_order: ops.ExpertWeightOrder = "EOI",
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        if getattr(router, "num_experts", None) is None:
            raise TypeError(
                f"router must be a router, such as nn.Router(dim, num_experts=8, top_k=2), got {router!r:.40}"
            )
        width = dim if latent_dim is None else latent_dim
        E, into, out = router.num_experts, (mlp_dim, width), (width, mlp_dim)
        self.router, self.shared = router, shared
        # One output, `...1`, which broadcasts over the width.
        self.shared_gate = Einsum("...D,ED->...E", (1, dim), ("router", "embed"), rngs=rngs) if shared_gate else None
        parts: dict[str, Any] = {"bias": bias, "weight_order": weight_order, "init": init, "rngs": rngs}
        self.gate = ExpertLinear(E, into, ("mlp", "expert_embed"), **parts) if gated else None
        self.up = ExpertLinear(E, into, ("mlp", "expert_embed"), **parts)
        self.down = ExpertLinear(E, out, ("expert_embed", "mlp"), **parts)
        if latent_dim is None:
            self.enter, self.leave = None, None
        else:
            self.enter = Einsum("...D,LD->...L", (width, dim), ("rank", "embed"), rngs=rngs)
            self.leave = Einsum("...L,DL->...D", (dim, width), ("embed", "rank"), rngs=rngs)
        self.activation, self.losses = activation, tuple(losses)
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
            The output, `B T D`, and arrays by name: the router's losses; `moe/load`, each expert's share of the
            choices; `moe/counts`, how often each was chosen, unless the ids of tokens decide.

        Raises:
            ValueError: when `x` is not of shape `B T D`.
        """
        check_is_rows(x)
        valid = None if ctx is None else ctx.valid
        routing = self._route(x if routed_by is None else routed_by, ctx)
        # [B, T, D] -> [B, T, L]
        h = x if self.enter is None else self.enter(x)
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
        y = self._add_output_bias(self._mix(h, routing, valid), routing, valid)
        # [B, T, L] -> [B, T, D], applied once to the sum over experts
        y = y if self.leave is None else self.leave(y)
        return y if self.shared is None else y + self._shared(x), self._aux(routing, ctx)

    def _route(self, x, ctx: Context | None) -> Routing:
        """Returns the router's decisions; some routers decide by the ids of tokens."""
        if not takes_tokens(self.router):
            return self.router(x)
        return cast(Any, self.router)(x, None if ctx is None else ctx.tokens)

    def _shared(self, x):
        """Applies the shared layer and its gate."""
        y = cast(Any, self.shared)(x)
        return y if self.shared_gate is None else y * jax.nn.sigmoid(self.shared_gate(x))

    def _mix(self, x, routing: Routing, valid):
        """Returns the weighted sum without the output bias, `B T D`; each device computes its own rows."""
        E, tokens = self.router.num_experts, ("batch", "seq")
        # The mesh axis over which experts are split and tokens are exchanged; None if experts are not split.
        axis = axis_of("act_expert") if E % axis_size("act_expert") == 0 else None
        rows, biased = (*tokens, None), ("act_expert", "mlp")
        # Without a gate, only up.
        into = [m for m in (self.gate, self.up) if m is not None]
        parts = (*into, self.down)
        matrices = [expert_matrices(m, "I" if m is self.down else "O", x.dtype) for m in parts]
        w, tree = jax.tree.flatten([m.values for m in matrices])
        b = [None if m.b is None else jnp.asarray(m.b[...], x.dtype) for m in into]
        # An adapter has arrays, so it is passed along with the matrices.
        matmuls = tuple(None if isinstance(m.matmul, LowRank) else m.matmul for m in parts)
        how = {"activation": self.activation, "weight_orders": (matrices[0].weight_order, matrices[-1].weight_order)}
        options = {**how, "num_experts": E, "axis": axis}
        run = functools.partial(local_experts, matmuls=matmuls, tree=tree, **options)
        split = [names for m in matrices for names in m.names]
        # shard_map takes flat arguments, with one tuple of axis names for each array, in the order of the call below:
        #   x, experts, weights, input_weights   rows      [B, T, ...]
        #   valid                                tokens    [B, T]
        #   b: biases of gate and up             biased    [E, F]
        #   w: arrays of gate, up and down       split     (also a quantized one's scales, an adapted one's factors)
        # If the width F is split, each device returns its part of the sum on a new first axis "mlp".
        names = [rows, rows, rows, rows, tokens, *[biased] * len(into), *split]
        mapped = shard_map_by_name(run, names, ("mlp", *rows))
        # [1 or number of parts of F, B, T, D] -> [B, T, D]
        return mapped(x, routing.experts, routing.weights, routing.input_weights, valid, *b, *w).sum(axis=0)

    def _add_output_bias(self, y, routing: Routing, valid):
        """Adds the weighted biases of the down projections.

        This runs outside the shard_map, in which every device with a part of the width would add the bias again.
        """
        if self.down.b is None:
            return y
        weights = jnp.where(valid[..., None], routing.weights, 0)
        # [B, T, X] -> [B, T, E]: each token's weight for every expert.
        share = jnp.einsum("...X,...XE->...E", weights, jax.nn.one_hot(routing.experts, self.router.num_experts))
        # Every device gathers the biases and adds up a gradient of its own tokens. Left to XLA, the gradient of biases
        # that are split by expert would gather the tokens of all devices.
        tokens, biases = ("batch", "seq", None), AllGatherArg(("expert", "expert_embed"), (None, None))
        add = shard_map_by_name(lambda share, b: jnp.einsum("...E,ED->...D", share, b), [tokens, biases], tokens)
        return y + add(share.astype(y.dtype), jnp.asarray(self.down.b[...], y.dtype))

    def _aux(self, routing: Routing, ctx: Context | None) -> dict[str, Array]:
        """Returns losses and metrics by name."""
        valid = None if ctx is None else ctx.valid
        # [E]: choices of real tokens.
        counts = expert_counts(routing.experts, valid, self.router.num_experts)
        total = jnp.maximum(counts.sum(), 1)
        aux = {loss.name: loss(routing, ctx) for loss in self.losses} | {"moe/load": counts / total}
        # Counts can be added over microbatches; shares cannot, because microbatches have different numbers of tokens.
        # They move the expert biases; a choice by the token's id has none.
        if not takes_tokens(self.router):
            aux["moe/counts"] = counts
        return aux

    def reference(self, x: Float[Array, "B T D"], ctx: Context | None = None) -> Float[Array, "B T D"]:
        """Computes the output by a plain loop in which every expert computes every token (the
        specification).
        """
        routing, inputs = self._route(x, ctx), x if self.enter is None else self.enter(x)

        def add(y, expert):
            e, gate, up, down = expert
            chosen = routing.experts == e
            chosen = chosen if ctx is None or ctx.valid is None else chosen & ctx.valid[..., None]

            def weight(values: Array) -> Array:
                # [B, T, X] -> [B, T, 1]: that of this expert for each token, 0 if it was not chosen.
                return jnp.where(chosen, values, 0).sum(axis=-1, keepdims=True)

            scaled = inputs
            if routing.input_weights is not None:
                scaled = (weight(routing.input_weights) * inputs).astype(x.dtype)
            h = self.activation(*(linear.one(scaled) for linear in (gate, up) if linear is not None))
            return y + (weight(routing.weights) * down.one(h)).astype(x.dtype), None

        experts = (jnp.arange(self.router.num_experts), self.gate, self.up, self.down)
        # One expert at a time: a scan over the leading axis E of the three matrices.
        y = jax.lax.scan(add, jnp.zeros_like(inputs), experts)[0]
        y = y if self.leave is None else self.leave(y)
        return y if self.shared is None else y + self._shared(x)


# ---------------------------------------------------------------------------------------------- on one device


def local_experts(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T X"],
    weights: Float[Array, "B T X"],
    input_weights: Float[Array, "B T X"] | None,
    valid: Bool[Array, "B T"],
    *rest: Any,
    activation: Callable[..., Array],
    weight_orders: tuple[ops.ExpertWeightOrder, ops.ExpertWeightOrder],
    matmuls: tuple[Matmul | None, ...],
    tree: Any,
    num_experts: int,
    axis: str | None,
) -> Float[Array, "1 B T D"]:
    """Applies one device's experts to its tokens; over an expert axis, tokens are first sent to their experts.

    Args:
        x: Tokens of this device.
        experts: Ids of the chosen experts, counted over all devices.
        weights: Factors on results.
        input_weights: Factors on inputs, or None.
        valid: False for padding.
        *rest: Biases of gate and up (or only up), then the leaves of `tree`.
        activation: Combines the gate and up projections.
        weight_orders: Order of the dimensions of gate and up, and of down.
        matmuls: Matmul of each projection, None where the adapter in `tree` multiplies.
        tree: Structure of the matrices and adapters, one pair `(w, adapter)` for each projection.
        num_experts: Number E of experts on all devices.
        axis: Mesh axis over which experts are split, or None.

    Returns:
        The weighted sums, with a new first axis on which devices that hold parts of the width F are put side by side.
    """
    into = len(matmuls) - 1
    biases, matrices = rest[:into], jax.tree.unflatten(tree, rest[into:])
    parts = zip(matmuls, matrices, (*biases, None), strict=True)
    linears = [(matmul or adapter, w, b) for matmul, (w, adapter), b in parts]
    apply = functools.partial(_apply, linears=linears, activation=activation, weight_orders=weight_orders)
    # [B, T, ...] -> [B * T, ...]
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, experts, weights, input_weights, valid))
    if axis is None:
        plan = dispatch.dropless(flat[1], flat[4], num_experts)
        # [M, D] -> [R, D] -> [R, D] -> [M, D]
        y = dispatch.combine(apply(*dispatch.weighted_rows(flat[0], flat[2], flat[3], plan), plan), plan)
    else:
        y = exchange.dropless(*flat, apply=apply, num_experts=num_experts, axis=axis)
    # Where gradients need this sum, recomputing it would run the experts, and the exchange of tokens, once more.
    y = checkpoint_name(y, "moe")
    # [B, T, D] -> [1, B, T, D]: the axis of partial sums over the parts of the width.
    return y.reshape(1, *x.shape)


def _apply(rows, weights, plan: dispatch.Plan, *, linears, activation, weight_orders):
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
    return plan.last((h * weights).astype(h.dtype), down, out)
