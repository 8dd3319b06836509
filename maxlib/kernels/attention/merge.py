"""Merging of softmaxes over different keys into one over all keys, by their log-sum-exps."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_parts(
    outs: Float[Array, "P *rows Hv"], lses: Float[Array, "P *rows"]
) -> tuple[Float[Array, "*rows Hv"], Float[Array, "*rows"]]:
    """Merges attention over P disjoint parts of the keys.

    Args:
      outs: output of each part, normalised over its own keys.
      lses: log-sum-exp of the logits of each part.

    Returns:
      The output and the log-sum-exp over all keys; zeros and `-inf` for a row without a visible key in any part.
    """
    # out = sum_p exp(lse_p) out_p / sum_p exp(lse_p), shifted by the largest lse so that no exponential overflows.
    peak = jnp.max(lses, axis=0, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(lses - peak)  # [P, *rows]
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.sum(weights[..., None] * outs, axis=0) / safe[..., None]
    return out, jnp.where(total > 0, peak[0] + jnp.log(safe), -jnp.inf)
