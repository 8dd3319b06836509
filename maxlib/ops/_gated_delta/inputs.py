"""Inputs of the implementations of the gated delta rule: heads grouped by key head, padding without effect."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._xla_workarounds import inner, scaled

EPS = 1e-6  # added to the squared norm of a query or key


class Inputs(NamedTuple):
    """Inputs of the recurrence for each token.

    Args:
      q: queries, `B T K Hk`.
      k: keys, `B T K Hk`.
      v: values, `B T K G Hv`, of the G value heads that share a key head.
      log_decay: logarithm of the factor on the state, `B T K G`, float32 or float64.
      beta: step towards the value, `B T K G`, float32 or float64.
      is_start: `B T`, True if the state before a token is zero; None if it never is.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    is_start: Array | None


def grouped(q, k, v, log_decay, beta, is_start, valid) -> Inputs:
    """Returns the inputs with heads grouped by key head, and padding that does not change the state."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    log_decay, beta = (a.astype(wide) for a in (log_decay, beta))
    by_key_head = lambda a: a.reshape(*a.shape[:2], k.shape[2], -1, *a.shape[3:])  # [B, T, N, ...] -> [B, T, K, G, ...]
    if valid is not None:
        # A token with g = 0 and beta = 0 does not change the state.
        log_decay, beta = (jnp.where(valid[:, :, None], a, 0.0) for a in (log_decay, beta))
    return Inputs(q, k, by_key_head(v), by_key_head(log_decay), by_key_head(beta), is_start)


def widened(x: Inputs, *, scale: float, l2_norm: bool) -> Inputs:
    """Returns the inputs in float32 or wider, with scaled queries, and queries and keys of unit norm if requested."""
    q, k, v = (a.astype(x.beta.dtype) for a in (x.q, x.k, x.v))
    if l2_norm:
        q, k = _unit(q), _unit(k)
    return x._replace(q=q * scale, k=k, v=v)


def _unit(x: Array) -> Array:
    """Scales each head to unit norm."""
    return scaled(x, jax.lax.rsqrt(inner(x, x) + EPS))
