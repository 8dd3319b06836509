"""What the implementations of Kimi delta attention are given: padding without effect, queries and keys normed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

EPS = 1e-6  # added to the squared norm of a query or key


class Inputs(NamedTuple):
    """Contributions of each token to the recurrence.

    Args:
      q: queries, `B T N Hk`.
      k: keys, `B T N Hk`.
      v: values, `B T N Hv`.
      log_decay: logarithm of the factor on each row of the state, `B T N Hk`, float32 or float64.
      beta: step towards the value, `B T N`, float32 or float64.
      is_start: `B T`, True where the state before a token is zero.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    is_start: Array


def prepare(q, k, v, log_decay, beta, is_start, valid) -> Inputs:
    """Returns the inputs with rates in float32 or wider, and padding that does not change the state."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    log_decay, beta = log_decay.astype(wide), beta.astype(wide)
    if valid is not None:
        # A token with g = 0 and beta = 0 leaves the state as it is.
        log_decay = jnp.where(valid[:, :, None, None], log_decay, 0.0)
        beta = jnp.where(valid[:, :, None], beta, 0.0)
    starts = jnp.zeros(q.shape[:2], bool) if is_start is None else is_start
    return Inputs(q, k, v, log_decay, beta, starts)


def widened(x: Inputs, *, scale: float, l2_norm: bool) -> Inputs:
    """Returns the inputs in float32 or wider, with scaled queries, and queries and keys of unit norm if requested."""
    q, k, v = (a.astype(x.beta.dtype) for a in (x.q, x.k, x.v))
    if l2_norm:
        q, k = _unit(q), _unit(k)
    return x._replace(q=q * scale, k=k, v=v)


def _unit(x: Array) -> Array:
    """Scales each head to length one."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
