"""Routers, which choose the experts of each token and their weights; with them, losses that balance the experts.

Shapes: leading axes `*B` (usually B rows and T tokens), D width, E experts, X = top_k chosen experts of a token.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn._initial_values import Init
from maxlib.nn._linear import Einsum
from maxlib.nn.experts._bias import ExpertBias as ExpertBias
from maxlib.nn.experts._bias import expert_bias_paths as expert_bias_paths
from maxlib.nn.experts._bias import moved_biases as moved_biases
from maxlib.nn.experts._bias import update_router_bias as update_router_bias
from maxlib.nn.experts._losses import RouterZ as RouterZ
from maxlib.nn.experts._losses import SequenceBalance as SequenceBalance
from maxlib.nn.experts._losses import SwitchBalance as SwitchBalance
from maxlib.nn.experts._routing import Routing as Routing
from maxlib.nn.experts._routing import expert_counts as expert_counts
from maxlib.nn.norm import RMSNorm
from maxlib.sharding import shard_map_by_name


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
        logits = _logits(self.gate, x)
        # [*B, D] -> [*B, E]
        scores = self.score(logits)
        experts = _choose(self._preference(logits, scores), self.top_k, self.groups)
        # [*B, X]: the scores of the chosen experts, without the bias.
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.renormalize:
            # 1e-20 avoids 0 / 0 when all chosen sigmoids are zero.
            weights = _shares(weights, 1e-20)
        # Sigmoid scores do not sum to 1; the balance losses need probabilities.
        return Routing(experts, weights * self.scale, logits, _shares(scores))

    def _preference(self, logits, scores):
        """Returns the scores for choosing experts."""
        if self.expert_bias is not None:
            return scores + jnp.broadcast_to(self.expert_bias[...], scores.shape)
        # Logits have the same order as their scores, and still differ where the scores saturate.
        return logits if self.groups is None else scores


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
        return Routing(experts, weights * self.expert_scale[...][experts], logits, probs)


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
    run = lambda scores: jax.lax.top_k(scores if groups is None else groups(scores), top_k)[1]
    names = ("batch", "seq", None) if preference.ndim == 3 else (None,) * preference.ndim
    # Ids have no gradient; the router is trained through the weights.
    return shard_map_by_name(run, [names], names)(jax.lax.stop_gradient(preference))


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
