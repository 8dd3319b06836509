"""Routers: which experts a token goes to, with what weight, and how evenly they are used."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.paths import dotted
from maxlib.nn._linear import Einsum, Init
from maxlib.nn._pytree import pytree
from maxlib.nn.stack import Stack
from maxlib.nn.tree import is_variable
from maxlib.sharding import shard_map_by_name


@pytree
class Routing:
    """What a router decided, in float32.

    experts, weights: the chosen experts of each token, and the factors of their results. logits, probs: the scores of
    all experts, before and after normalization (`probs` sum to 1 and ignore any expert_bias). input_weights: factors of
    the chosen experts' inputs, if any.
    """

    experts: Int[Array, "*B X"]
    weights: Float[Array, "*B X"]
    logits: Float[Array, "*B E"]
    probs: Float[Array, "*B E"]
    input_weights: Float[Array, "*B X"] | None = None


class ExpertBias(nnx.Variable):
    """A bias on the choice of experts that no gradient trains; `update_router_bias` does."""


@dataclasses.dataclass(frozen=True)
class GroupLimit:
    """Only experts of the `top_groups` best of `num_groups` groups may be chosen.

    A group is as good as the sum of its `best` highest scores: 1 in DeepSeek V2, 2 in V3 (arXiv:2412.19437).
    """

    num_groups: int
    top_groups: int
    best: int = 2

    def __call__(self, scores: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """`scores`, with -inf for the experts of all other groups."""
        groups = scores.reshape(*scores.shape[:-1], self.num_groups, -1)
        rank = jax.lax.top_k(groups, self.best)[0].sum(axis=-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(rank, self.top_groups)[1], self.num_groups, dtype=bool).any(axis=-2)
        return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(scores.shape)


class Router(nnx.Module):
    """Chooses the `top_k` experts with the highest scores, and weighs them by these scores.

    score: softmax or sigmoid of the logits. renormalize: whether the weights of a token sum to `scale`; after softmax
    this equals a softmax over the chosen logits only (Mixtral, GPT-OSS). scale: factor of the weights. groups: limits
    the choice. expert_bias: adds a bias to the scores for the choice, not for the weights (Wang et al. 2024,
    arXiv:2408.15664). bias: a trained one on the logits.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        top_k: int,
        score: Callable[[Array], Array] = jax.nn.softmax,
        renormalize: bool = True,
        scale: float = 1.0,
        groups: GroupLimit | None = None,
        expert_bias: bool = False,
        bias: bool = False,
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        _check(num_experts, top_k, groups)
        self.gate = _gate(dim, num_experts, bias=bias, init=init, rngs=rngs)
        self.expert_bias = ExpertBias(jnp.zeros(num_experts), axes=("router",)) if expert_bias else None
        self.score, self.renormalize, self.scale, self.groups = score, renormalize, scale, groups
        self.num_experts, self.top_k = num_experts, top_k

    def __call__(self, x: Float[Array, "*B D"]) -> Routing:
        logits = _logits(self.gate, x)
        scores = self.score(logits)
        experts = _choose(self._preference(logits, scores), self.top_k, self.groups)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.renormalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        probs = scores / scores.sum(axis=-1, keepdims=True)
        return Routing(experts, weights * self.scale, logits, probs)

    def _preference(self, logits, scores):
        if self.expert_bias is not None:
            return scores + jnp.broadcast_to(self.expert_bias[...], scores.shape)
        # Logits are in the same order as their scores, and differ where these are saturated.
        return logits if self.groups is None else scores


class SigmoidInputRouter(nnx.Module):
    """Chooses the `top_k` highest logits, and scales the *input* of each chosen expert by the sigmoid of its logit
    (Llama 4).
    """

    def __init__(self, dim: int, num_experts: int, *, top_k: int, init: Init | None = None, rngs: nnx.Rngs):
        _check(num_experts, top_k, None)
        self.gate = _gate(dim, num_experts, bias=False, init=init, rngs=rngs)
        self.num_experts, self.top_k = num_experts, top_k

    def __call__(self, x: Float[Array, "*B D"]) -> Routing:
        logits = _logits(self.gate, x)
        experts = _choose(logits, self.top_k)
        scales = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, axis=-1))
        return Routing(experts, jnp.ones_like(scales), logits, jax.nn.softmax(logits), scales)


def _gate(dim: int, num_experts: int, *, bias: bool, init: Init | None, rngs: nnx.Rngs) -> Einsum:
    # Not the axis name "expert": every device scores all experts.
    return Einsum("...D,ED->...E", (num_experts, dim), ("router", "embed"), bias=bias, init=init, rngs=rngs)


def _logits(gate: Einsum, x):
    return gate(x.astype(jnp.promote_types(x.dtype, jnp.float32)))


def _choose(preference, top_k: int, groups: GroupLimit | None = None):
    """The `top_k` preferred experts. Left to itself, XLA would gather the scores of all devices for a `top_k`."""
    run = lambda scores: jax.lax.top_k(scores if groups is None else groups(scores), top_k)[1]
    names = ("batch", "seq", None) if preference.ndim == 3 else (None,) * preference.ndim
    return shard_map_by_name(run, [names], names)(jax.lax.stop_gradient(preference))


def _check(num_experts: int, top_k: int, groups: GroupLimit | None) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and num_experts={num_experts}, got {top_k}")
    if groups is None:
        return
    size, rest = divmod(num_experts, groups.num_groups)
    if rest or not 1 <= groups.best <= size or not 1 <= groups.top_groups <= groups.num_groups:
        raise ValueError(f"{groups} does not fit {num_experts} experts: groups must be of equal size, and large enough")
    if groups.top_groups * size < top_k:
        raise ValueError(f"top_k={top_k} experts cannot come from {groups.top_groups} groups of {size}")


def expert_counts(
    experts: Int[Array, "*B X"], valid: Bool[Array, "*B"] | None, num_experts: int, *, axis: int | None = None
) -> Float[Array, "..."]:
    """How many choices of valid tokens fell on each expert, summed over all axes but the first `axis`."""
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    if valid is not None:
        chosen = jnp.where(valid[..., None, None], chosen, 0)
    return chosen.sum(axis=tuple(range(axis or 0, experts.ndim)))


@dataclasses.dataclass(frozen=True)
class SwitchBalance:
    """Pulls towards even use of the experts over all tokens of the batch (Fedus et al. 2021, arXiv:2101.03961).

    `weight * E * sum(load * mean probability)`, which is `weight` when balanced, whatever `top_k`. Hugging Face's is
    `top_k` times as large, and takes all layers together.
    """

    weight: float
    name: str = dataclasses.field(default="loss/moe_balance", init=False)

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        E, X = routing.probs.shape[-1], routing.experts.shape[-1]
        share = expert_counts(routing.experts, valid, E) / X
        return self.weight * E * jnp.sum(share * _sum(routing.probs, valid)) / _number(routing, valid) ** 2


@dataclasses.dataclass(frozen=True)
class SequenceBalance:
    """The same within each row of the batch, averaged over the rows that have tokens (DeepSeek V3,
    arXiv:2412.19437).
    """

    weight: float
    name: str = dataclasses.field(default="loss/moe_sequence_balance", init=False)

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        (B, T, E), X = routing.probs.shape, routing.experts.shape[-1]
        tokens = jnp.full(B, T) if valid is None else valid.sum(axis=1)
        share = expert_counts(routing.experts, valid, E, axis=1) / X
        each = E * jnp.sum(share * _sum(routing.probs, valid, axis=1), axis=1) / jnp.maximum(tokens, 1) ** 2
        return self.weight * each.sum() / jnp.maximum((tokens > 0).sum(), 1)


@dataclasses.dataclass(frozen=True)
class RouterZ:
    """Keeps logits small: `weight` times the mean squared log-sum-exp (Zoph et al. 2022, arXiv:2202.08906)."""

    weight: float
    name: str = dataclasses.field(default="loss/router_z", init=False)

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        square = jax.nn.logsumexp(routing.logits, axis=-1, keepdims=True) ** 2
        return self.weight * _sum(square, valid)[0] / _number(routing, valid)


def _sum(values, valid, axis: int = 0):
    if valid is not None:
        values = jnp.where(valid[..., None], values, 0)
    return values.sum(axis=tuple(range(axis, values.ndim - 1)))


def _number(routing: Routing, valid):
    if valid is None:
        return routing.experts[..., 0].size
    return jnp.maximum(valid.sum(), 1)


def update_router_bias(model: Any, load: Float[Array, "L E"] | Float[Array, " E"], *, rate: float) -> Any:
    """A new model whose routers' expert biases moved by `rate` towards the experts with less than the mean load.

    load: `aux["moe/load"]` of the step, a row per MoE layer; of a single layer outside a stack, one row without the
    first axis. Every layer that reports a load must have a expert_bias. Raises ValueError when the rows do not match
    the expert biases.
    """
    places = _expert_biases(model)
    load = jnp.atleast_2d(load)
    if len(places) != len(load):
        raise ValueError(
            f"load must have a row for each of the model's {len(places)} router expert biases, got {load.shape}"
        )
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(places):
        rows.setdefault(path, []).append(row)

    def move(path, leaf):
        if (name := dotted(path)) not in rows:
            return leaf
        old = leaf.get_value()
        mine = load[jnp.array(rows[name])].reshape(old.shape)
        return leaf.replace(old + rate * jnp.sign(mine.mean(axis=-1, keepdims=True) - mine).astype(old.dtype))

    return jax.tree_util.tree_map_with_path(move, model, is_leaf=is_variable)


def _expert_biases(model: Any) -> list[str]:
    """The path of every layer's expert_bias in layer order; layers that lie on one repeat axis share a path."""
    found = []
    is_node = lambda x: isinstance(x, Stack | ExpertBias)
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_node):
        if isinstance(node, ExpertBias):
            found.append(dotted(path))
        elif isinstance(node, Stack):
            for i in range(len(node)):
                place, _ = node.where(i)
                kind, slot = place.split(".")
                inner = _expert_biases(getattr(node, kind)[int(slot)])
                found += [".".join(filter(None, (dotted(path), place, one))) for one in inner]
    return found
