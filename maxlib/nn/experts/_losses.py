"""Losses on a router's decisions, which balance the experts or keep logits small.

Shapes: B rows, T tokens, E experts, X chosen experts of a token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib.nn.decoder._context import Context
from maxlib.nn.experts._routing import Routing, expert_counts


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
        # load = share / tokens and mean probability = sum / tokens, hence the square of the number of tokens.
        valid = None if ctx is None else ctx.valid
        share = expert_counts(routing.experts, valid, E) / X
        return self.weight * E * jnp.sum(share * _sum(routing.probs, valid)) / _num_valid(routing, valid) ** 2


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
        return self.weight * _sum(square, valid)[0] / _num_valid(routing, valid)


def _by_document(values: Float[Array, "B T N"], ctx: Context | None) -> Float[Array, "B documents N"]:
    """Sums values over each document, without padding; in packed rows a sum is at the column of the first token."""
    if ctx is None or ctx.valid is None:
        return values.sum(axis=1, keepdims=True)
    values = jnp.where(ctx.valid[..., None], values, 0)
    return jax.vmap(lambda row, start: jnp.zeros_like(row).at[start].add(row))(values, ctx.start)


def _sum(values, valid):
    """Sums `values` over all axes but the last, without padding."""
    if valid is not None:
        values = jnp.where(valid[..., None], values, 0)
    return values.sum(axis=tuple(range(values.ndim - 1)))


def _num_valid(routing: Routing, valid):
    """Returns the number of valid tokens, at least 1."""
    if valid is None:
        return routing.experts[..., 0].size
    return jnp.maximum(valid.sum(), 1)
