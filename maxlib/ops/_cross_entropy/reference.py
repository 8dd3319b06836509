"""The specification: all logits at once, differentiated by JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.ops._cross_entropy.terms import Options, Terms, logits_of, terms_of


def reference(
    rows: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    chunk: int | None,
    options: Options,
) -> tuple[Array, Terms]:
    """Computes the weighted sum of the losses and the per-token terms from all logits at once."""
    terms = terms_of(logits_of(rows, weight.astype(rows.dtype), options), targets, options)
    return jnp.sum(weights * terms.token_loss), terms
