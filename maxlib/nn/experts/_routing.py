"""The decisions of a router, and how often they choose each expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree


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
