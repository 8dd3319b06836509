"""Softmaxes over different keys become the one over all of them, by their log-sum-exps."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_parts(
    outs: Float[Array, "P *rows Hv"], lses: Float[Array, "P *rows"]
) -> tuple[Float[Array, "*rows Hv"], Float[Array, "*rows"]]:
    """The output and log-sum-exp over the keys of all P parts; a row that sees nothing in any of them gives zeros and
    `-inf`.
    """
    peak = jnp.max(lses, axis=0, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(lses - peak)
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.sum(weights[..., None] * outs, axis=0) / safe[..., None]
    return out, jnp.where(total > 0, peak[0] + jnp.log(safe), -jnp.inf)
