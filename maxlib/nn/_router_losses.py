"""Losses on a router's decisions, which balance the experts or keep logits small.

Shapes: B rows, T tokens, E experts, X chosen experts of a token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib.nn._routing import Routing, expert_counts


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

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        E, X = routing.probs.shape[-1], routing.experts.shape[-1]
        # load = share / tokens and mean probability = sum / tokens, hence the square of the number of tokens.
        share = expert_counts(routing.experts, valid, E) / X
        return self.weight * E * jnp.sum(share * _sum(routing.probs, valid)) / _num_valid(routing, valid) ** 2


@dataclasses.dataclass(frozen=True)
class SequenceBalance:
    """Balance loss within each row of the batch, averaged over non-empty rows (DeepSeek V3, arXiv:2412.19437).

    Args:
        weight: Factor on the loss.
    """

    weight: float
    name: str = dataclasses.field(default="loss/moe_sequence_balance", init=False)

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        (B, T, E), X = routing.probs.shape, routing.experts.shape[-1]
        tokens = jnp.full(B, T) if valid is None else valid.sum(axis=1)
        # [B, E], then one loss for each row, [B].
        share = expert_counts(routing.experts, valid, E, axis=1) / X
        each = E * jnp.sum(share * _sum(routing.probs, valid, axis=1), axis=1) / jnp.maximum(tokens, 1) ** 2
        return self.weight * each.sum() / jnp.maximum((tokens > 0).sum(), 1)


@dataclasses.dataclass(frozen=True)
class RouterZ:
    """Loss that keeps logits small: `weight` times the mean squared log-sum-exp (Zoph et al. 2022, arXiv:2202.08906).

    Args:
        weight: Factor on the loss.
    """

    weight: float
    name: str = dataclasses.field(default="loss/router_z", init=False)

    def __call__(self, routing: Routing, valid: Bool[Array, "B T"] | None) -> Float[Array, ""]:
        """Returns the loss of one layer."""
        # Padding may hold logits whose gradient is not finite.
        logits = routing.logits if valid is None else jnp.where(valid[..., None], routing.logits, 0)
        # [B, T, E] -> [B, T, 1]
        square = jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2
        return self.weight * _sum(square, valid)[0] / _num_valid(routing, valid)


def _sum(values, valid, axis: int = 0):
    """Sums `values` over the axes from `axis` to the second to last, without padding."""
    if valid is not None:
        values = jnp.where(valid[..., None], values, 0)
    return values.sum(axis=tuple(range(axis, values.ndim - 1)))


def _num_valid(routing: Routing, valid):
    """Returns the number of valid tokens, at least 1."""
    if valid is None:
        return routing.experts[..., 0].size
    return jnp.maximum(valid.sum(), 1)
