"""Routers, which choose the experts of each token and their weights; with them, losses that balance the experts.

Shapes: leading axes `*B` (usually B rows and T tokens), D width, E experts, X = top_k chosen experts of a token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.paths import dotted
from maxlib._utils.rows import take_rows
from maxlib.nn._initial_values import Init
from maxlib.nn._linear import Einsum, draw_key
from maxlib.nn._patching import EXPERTS
from maxlib.nn._patching import record as record
from maxlib.nn._patching import replay as replay
from maxlib.nn._patching import route_rows as route_rows
from maxlib.nn._pytree import pytree
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import RMSNorm
from maxlib.nn.stack import Stack
from maxlib.nn.tree import combine, variables
from maxlib.sharding import shard_map_by_name


@pytree
class Routing:
    """Decisions of a router, in float32.

    Attributes:
        experts: Ids of the chosen experts of each token.
        weights: Factors on the results of these experts.
        logits: Scores of all experts before normalization.
        probs: Normalized scores of all experts, which sum to 1, without the expert bias.
        input_weights: Factors on the inputs of the chosen experts, or None.
    """

    experts: Int[Array, "*B X"]
    weights: Float[Array, "*B X"]
    logits: Float[Array, "*B E"]
    probs: Float[Array, "*B E"]
    input_weights: Float[Array, "*B X"] | None = None


def expert_counts(experts: Int[Array, "*B X"], valid: Bool[Array, "*B"] | None, num_experts: int) -> Float[Array, " E"]:
    """Counts the choices of each expert among valid tokens.

    Args:
        experts: Ids of the chosen experts, `*B X`.
        valid: False for padding, `*B`; None if every token is real.
        num_experts: Number E of experts.

    Returns:
        Counts in float32.
    """
    # [*B, X] -> [*B, X, E]
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
    if valid is not None:
        chosen = jnp.where(valid[..., None, None], chosen, 0)
    return chosen.sum(axis=tuple(range(experts.ndim)))


class ExpertBias(nnx.Variable):
    """Bias on the choice of experts. It has no gradient; a training step updates it (`update_router_bias`).

    It is float32 or wider: rounded, it would choose others, and a step of 0.001 would not change it.
    """


@dataclasses.dataclass(frozen=True)
class GroupLimit:
    """Limits the choice to experts in the `top_groups` best of `num_groups` groups (DeepSeek V2, arXiv:2405.04434).

    The score of a group is the sum of the highest scores in it.

    Args:
        num_groups: Number of groups, all of the same size.
        top_groups: Number of groups that experts may come from.
        scores_per_group: Number of scores of a group that are summed: 1 in DeepSeek V2, 2 in V3 (arXiv:2412.19437).
    """

    num_groups: int
    top_groups: int
    scores_per_group: int = 2

    def __call__(self, scores: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """Returns `scores`, with -inf for the experts of all other groups."""
        # [*B, E] -> [*B, G, E / G]
        groups = scores.reshape(*scores.shape[:-1], self.num_groups, -1)
        # [*B, G, scores] -> [*B, G], the score of each group
        rank = jax.lax.top_k(groups, self.scores_per_group)[0].sum(axis=-1)
        # [*B, top_groups] -> one-hot [*B, top_groups, G] -> mask [*B, G]
        chosen = jax.nn.one_hot(jax.lax.top_k(rank, self.top_groups)[1], self.num_groups, dtype=bool).any(axis=-2)
        return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(scores.shape)


class Router(nnx.Module):
    """Router that chooses the `top_k` experts with the highest scores and weighs them by these scores.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        top_k: Experts per token.
        score: Maps logits to scores: softmax or sigmoid.
        renormalize: True makes the weights of a token sum to `scale`. After softmax this equals a softmax over the
            chosen logits only (Mixtral, GPT-OSS).
        scale: Factor on the weights.
        groups: Limits the choice to experts of a few groups; None for no limit.
        expert_bias: True adds a bias to the scores for the choice, but not to the weights (Wang et al. 2024,
            arXiv:2408.15664).
        bias: True adds a trained bias to the logits.
        init: Initializer of the weight.
        rngs: Source of initial values.

    Raises:
        ValueError: when `top_k` is not between 1 and `num_experts`, or `groups` does not fit them.
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
        # Zero until the first update.
        self.expert_bias = ExpertBias(jnp.zeros(num_experts), axes=("router",)) if expert_bias else None
        self.score, self.renormalize, self.scale, self.groups = score, renormalize, scale, groups
        self.num_experts, self.top_k = num_experts, top_k

    def __call__(self, x: Float[Array, "*B D"]) -> Routing:
        """Returns the routing of tokens `*B D`."""
        return self.routing(x)

    def routing(self, x: Float[Array, "*B D"], experts: Int[Array, "*B X"] | None = None) -> Routing:
        """Returns the routing of tokens to given experts, or to those with the highest scores."""
        logits = _logits(self.gate, x)
        # [*B, D] -> [*B, E]
        scores = self.score(logits)
        chosen = _choose(self._preference(logits, scores), self.top_k, self.groups) if experts is None else experts
        # [*B, X]: the scores of the chosen experts, without the bias.
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.renormalize:
            # 1e-20 avoids 0 / 0 when all chosen sigmoids are zero.
            weights = _shares(weights, 1e-20)
        # Sigmoid scores do not sum to 1; the balance losses need probabilities.
        return Routing(chosen, weights * self.scale, logits, _shares(scores))

    def _preference(self, logits, scores):
        """Returns the scores for choosing experts."""
        if self.expert_bias is not None:
            return scores + jnp.broadcast_to(self.expert_bias[...], scores.shape)
        # Logits have the same order as their scores, and still differ where the scores saturate.
        return logits if self.groups is None else scores


def sqrt_softplus(logits: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
    """Returns `sqrt(log(1 + exp(logits)))`, the scores of DeepSeek V4."""
    # The gradient of the root at 0 is infinite: no score is below the smallest normal number.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(logits.dtype).tiny))


class HashRouter(Router):
    """Router whose `top_k` experts of a token are stored by its id; scores of the token only weigh them.

    The table is stored with the model and not trained. Its initial values give every expert as many ids as any other.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        vocab: Number of token ids.
        top_k: Experts per token.
        rngs: Source of initial values.
        **options: `score`, `renormalize`, `scale`, `bias` and `init` of a `Router`.
    """

    takes_tokens = True

    def __init__(self, dim: int, num_experts: int, *, vocab: int, top_k: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(dim, num_experts, top_k=top_k, rngs=rngs, **options)
        # Experts at equal distances from a first one, so that those of an id differ.
        first = jax.random.permutation(draw_key(rngs), jnp.arange(vocab)) % num_experts
        experts = (first[:, None] + jnp.arange(top_k)[None] * (num_experts // top_k)) % num_experts
        self.table = nnx.Variable(experts.astype(jnp.int32), axes=("vocab", None))

    def __call__(self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"] | None = None) -> Routing:
        """Returns the routing of tokens.

        Args:
            x: Tokens, `B T D`.
            tokens: Their ids, `B T`.

        Raises:
            ValueError: when there are no ids.
        """
        if tokens is None:
            raise ValueError(
                "a HashRouter needs the ids of tokens, but ctx.tokens is None: set layers_take_tokens = True on the model, "
                "or pass tokens= to nn.make_context"
            )
        # [B, T] -> [B, T, X]
        return self.routing(x, self.table[...][tokens])


def sigmoid_router(
    dim: int,
    num_experts: int,
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    rngs: nnx.Rngs,
) -> Router:
    """Makes the router of DeepSeek V3 (arXiv:2412.19437): sigmoid scores, groups, and a bias that balances the load.

    The bias enters the choice of experts, but not their weights. With fewer `top_groups` than `num_groups`, experts
    come from the groups with the largest sums of their two best scores.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        top_k: Experts per token.
        num_groups: Number of groups of experts.
        top_groups: Number of groups that the experts of a token come from.
        renormalize: True makes the weights of a token sum to `scale`.
        scale: Factor on the weights.
        rngs: Source of initial values.
    """
    return Router(
        dim,
        num_experts,
        top_k=top_k,
        score=jax.nn.sigmoid,
        renormalize=renormalize,
        scale=scale,
        groups=GroupLimit(num_groups, top_groups) if top_groups < num_groups else None,
        expert_bias=True,
        rngs=rngs,
    )


class ScaledRouter(nnx.Module):
    """Router that normalizes its input and scales each expert's weight (Gemma 4).

    It takes a softmax over all experts and renormalizes the `top_k` best to a sum of 1 before scaling them.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        top_k: Experts per token.
        eps: Of the norm.
        rngs: Source of initial values.

    Raises:
        ValueError: when `top_k` is not between 1 and `num_experts`.
    """

    def __init__(self, dim: int, num_experts: int, *, top_k: int, eps: float = 1e-6, rngs: nnx.Rngs):
        _check(num_experts, top_k, None)
        self.norm = RMSNorm(dim, eps=eps)
        self.gate = _gate(dim, num_experts, bias=False, init=None, rngs=rngs)
        self.expert_scale = nnx.Param(jnp.ones(num_experts), axes=("router",))
        self.num_experts, self.top_k = num_experts, top_k

    def __call__(self, x: Float[Array, "*B D"]) -> Routing:
        """Returns the routing of tokens `*B D`."""
        # The norm has root mean square 1; dividing by sqrt(D) gives logits of variance 1.
        logits = _logits(self.gate, self.norm(x) * x.shape[-1] ** -0.5)
        probs = jax.nn.softmax(logits)
        # [*B, D] -> [*B, E] -> [*B, X]
        experts = _choose(logits, self.top_k, None)
        weights = jnp.take_along_axis(probs, experts, axis=-1)
        # [*B, X]: they sum to 1 before each expert's scale is applied.
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return Routing(experts, weights * take_rows(self.expert_scale[...], experts), logits, probs)


class SigmoidInputRouter(nnx.Module):
    """Router that scales the *input* of each chosen expert by the sigmoid of its logit (Llama 4).

    The `top_k` highest logits choose the experts; their results have the weight 1.

    Args:
        dim: Width D of the tokens.
        num_experts: Number E of experts.
        top_k: Experts per token.
        init: Initializer of the weight.
        rngs: Source of initial values.

    Raises:
        ValueError: when `top_k` is not between 1 and `num_experts`.
    """

    def __init__(self, dim: int, num_experts: int, *, top_k: int, init: Init | None = None, rngs: nnx.Rngs):
        _check(num_experts, top_k, None)
        self.gate = _gate(dim, num_experts, bias=False, init=init, rngs=rngs)
        self.num_experts, self.top_k = num_experts, top_k

    def __call__(self, x: Float[Array, "*B D"]) -> Routing:
        """Returns the routing of tokens `*B D`."""
        logits = _logits(self.gate, x)
        experts = _choose(logits, self.top_k)
        # [*B, E] -> [*B, X]
        scales = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, axis=-1))
        return Routing(experts, jnp.ones_like(scales), logits, jax.nn.softmax(logits), scales)


def _gate(dim: int, num_experts: int, *, bias: bool, init: Init | None, rngs: nnx.Rngs) -> Einsum:
    """Makes the projection from tokens to logits."""
    # The axis is not named "expert", because every device scores all experts.
    return Einsum("...D,ED->...E", (num_experts, dim), ("router", "embed"), bias=bias, init=init, rngs=rngs)


def _shares(scores, eps: float = 0.0):
    """Returns `scores / (sum + eps)`, 0 if all scores are; only scores that sum to 1e-18 have a gradient of the sum.

    That gradient, 1 / sum^2, would exceed float32.
    """
    total = scores.sum(axis=-1, keepdims=True) + eps
    total = jnp.where(total > 1e-18, total, jax.lax.stop_gradient(total))
    return scores / jnp.where(total > 0, total, 1)


def _logits(gate: Einsum, x):
    """Computes the logits in float32 or wider, because rounding could change the choice."""
    return gate(x.astype(jnp.promote_types(x.dtype, jnp.float32)))


def _choose(preference, top_k: int, groups: GroupLimit | None = None):
    """Returns the ids of the `top_k` experts with the highest preference, `*B X`."""

    # Without the shard_map, XLA gathers the scores of all devices for a `top_k`.
    def run(scores: Array) -> Array:
        return jax.lax.top_k(scores if groups is None else groups(scores), top_k)[1]

    names = ("batch", "seq", None) if preference.ndim == 3 else (None,) * preference.ndim
    # Ids have no gradient; the router is trained through the weights.
    chosen = shard_map_by_name(run, [names], names)(jax.lax.stop_gradient(preference))
    return checkpoint_name(chosen, EXPERTS)


def _check(num_experts: int, top_k: int, groups: GroupLimit | None) -> None:
    """Raises ValueError when `top_k` or the groups do not fit the number of experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and num_experts={num_experts}, got {top_k}")
    if groups is None:
        return
    size, rest = divmod(num_experts, groups.num_groups)
    if rest or not 1 <= groups.scores_per_group <= size or not 1 <= groups.top_groups <= groups.num_groups:
        raise ValueError(f"{groups} does not fit {num_experts} experts: groups must be of equal size, and large enough")
    if groups.top_groups * size < top_k:
        raise ValueError(f"top_k={top_k} experts cannot come from {groups.top_groups} groups of {size}")


def update_router_bias(model: Any, load: Float[Array, "L E"] | Float[Array, " E"], *, rate: float) -> Any:
    """Updates the expert biases of all routers to balance the experts (Wang et al. 2024, arXiv:2408.15664).

    Each bias changes by `rate`: up for experts with less than the mean load, down for those with more. A `Trainer` and
    `training.make_train_step` do this automatically.

    Args:
        model: A model or a layer. Every layer that reports a load must have an expert bias.
        load: `aux["moe/load"]` or `aux["moe/counts"]` of the step: a row for each MoE layer, or `E` for a single layer.
        rate: Size of a change.

    Returns:
        A new model.

    Raises:
        ValueError: when the number of rows differs from the number of expert biases.
    """
    paths = expert_bias_paths(model)
    load = jnp.atleast_2d(load)
    if len(paths) != len(load):
        raise ValueError(
            f"load must have a row for each of the model's {len(paths)} router expert biases, got {load.shape}"
        )
    return combine(moved_biases(model, paths, load, rate=rate), model)


def moved_biases(model: Any, paths: list[str], load: Float[Array, "L E"], *, rate: Any) -> dict[str, Array]:
    """Computes the new expert biases of `update_router_bias` by path.

    Args:
        model: A model or a layer.
        paths: The path of every row of `load`, from `expert_bias_paths`.
        load: Loads or counts of the experts.
        rate: Size of a change.
    """
    # Scanned layers share one variable [repeats, E]: collect its rows of `load`.
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(path, []).append(row)
    of_model = variables(model)

    def moved(path: str) -> Array:
        bias = of_model[path].get_value()
        # [repeats, E], or [E] for a layer that is not scanned.
        loads = load[jnp.array(rows[path])].reshape(bias.shape)
        mean = loads.mean(axis=-1, keepdims=True)
        # Ignore differences by rounding, so that sums over microbatches update the same biases as the whole batch.
        uneven = jnp.abs(mean - loads) > 1e-5 * mean
        return bias + (rate * jnp.where(uneven, jnp.sign(mean - loads), 0)).astype(bias.dtype)

    return {path: moved(path) for path in rows}


def expert_bias_paths(model: Any) -> list[str]:
    """Lists the path of every layer's expert bias in layer order; layers that are scanned together share a path.

    Args:
        model: A model or a layer.
    """
    paths = []
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, Stack | ExpertBias))
    for path, node in nodes:
        if isinstance(node, ExpertBias):
            paths.append(dotted(path))
        elif isinstance(node, Stack):
            for i in range(len(node)):
                place, _ = node.where(i)
                _, group, slot = place.split(".")
                inner = expert_bias_paths(node.groups[int(group)][int(slot)])
                paths += [".".join(filter(None, (dotted(path), place, inner_path))) for inner_path in inner]
    return paths


@dataclasses.dataclass(frozen=True)
class SwitchBalance:
    """Balance loss over all tokens of the batch (Fedus et al. 2021, arXiv:2101.03961).

    Computes `weight * E * sum(load * mean probability)`, which is `weight` when balanced, for any `top_k`. The loss of
    Hugging Face is `top_k` times as large and combines all layers.

    Args:
        weight: Factor on the loss.
    """

    weight: float
    name: str = dataclasses.field(default="loss/moe_balance", init=False)

    def __call__(self, routing: Routing, ctx: Context | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        E, X = routing.probs.shape[-1], routing.experts.shape[-1]
        valid = None if ctx is None else ctx.valid
        tokens = _num_valid(routing, valid)  # divided by twice, as its square may exceed int32
        load, mean = expert_counts(routing.experts, valid, E) / X / tokens, _sum_tokens(routing.probs, valid) / tokens
        return self.weight * E * jnp.sum(load * mean)


@dataclasses.dataclass(frozen=True)
class SequenceBalance:
    """Balance loss within each document, averaged over the documents of the batch (DeepSeek V3, arXiv:2412.19437).

    Args:
        weight: Factor on the loss.
    """

    weight: float
    name: str = dataclasses.field(default="loss/moe_sequence_balance", init=False)

    def __call__(self, routing: Routing, ctx: Context | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        E, X = routing.probs.shape[-1], routing.experts.shape[-1]
        # [B, T, X, E] -> [B, T, E]: 1 for chosen experts
        chosen = jax.nn.one_hot(routing.experts, E, dtype=routing.probs.dtype).sum(axis=2)
        # [B, documents, E] and, of tokens, [B, documents, 1]
        share, probs = _by_document(chosen, ctx) / X, _by_document(routing.probs, ctx)
        tokens = _by_document(jnp.ones_like(chosen[..., :1]), ctx)
        each = E * jnp.sum(share * probs / jnp.maximum(tokens, 1) ** 2, axis=-1)
        return self.weight * each.sum() / jnp.maximum((tokens > 0).sum(), 1)


@dataclasses.dataclass(frozen=True)
class RouterZ:
    """Loss that keeps logits small: `weight` times the mean squared log-sum-exp (Zoph et al. 2022, arXiv:2202.08906).

    Args:
        weight: Factor on the loss.
    """

    weight: float
    name: str = dataclasses.field(default="loss/router_z", init=False)

    def __call__(self, routing: Routing, ctx: Context | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        valid = None if ctx is None else ctx.valid
        # Padding may hold logits whose gradient is not finite.
        logits = routing.logits if valid is None else jnp.where(valid[..., None], routing.logits, 0)
        # [B, T, E] -> [B, T, 1]
        square = jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2
        return self.weight * _sum_tokens(square, valid)[0] / _num_valid(routing, valid)


def _by_document(values: Float[Array, "B T N"], ctx: Context | None) -> Float[Array, "B documents N"]:
    """Sums values over each document, without padding; in packed rows a sum is at the column of the first token."""
    if ctx is None or ctx.valid is None:
        return values.sum(axis=1, keepdims=True)
    values = jnp.where(ctx.valid[..., None], values, 0)
    return jax.vmap(lambda row, start: jnp.zeros_like(row).at[start].add(row))(values, ctx.start)


def _sum_tokens(values, valid):
    """Sums `values` over all axes but the last, without padding."""
    if valid is not None:
        values = jnp.where(valid[..., None], values, 0)
    return values.sum(axis=tuple(range(values.ndim - 1)))


def _num_valid(routing: Routing, valid):
    """Returns the number of valid tokens, at least 1."""
    if valid is None:
        return routing.experts[..., 0].size
    return jnp.maximum(valid.sum(), 1)
