"""Inputs of the implementations of state-space duality: heads grouped, padding without effect."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from maxlib._xla_workarounds import for_each_token


class Inputs(NamedTuple):
    """Inputs of the recurrence for each token, in float32 or float64.

    Args:
      x: inputs times their steps, `B T G R P`, for the R heads that share a group.
      b: input projections of the state, `B T G S`.
      c: output projections of the state, `B T G S`.
      log_decay: logarithm of the factor on the state, `B T G R`.
      is_start: `B T`, True if the state before a token is zero.
    """

    x: Array
    b: Array
    c: Array
    log_decay: Array
    is_start: Array


def prepare(x, b, c, dt, a, is_start, valid) -> Inputs:
    """Returns the inputs in float32 or wider with heads grouped."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x, b, c, dt, a = (part.astype(wide) for part in (x, b, c, dt, a))
    if valid is not None:
        # A step of zero does not change the state.
        dt = jnp.where(valid[:, :, None], dt, 0.0)
    by_group = lambda y: y.reshape(*y.shape[:2], b.shape[2], -1, *y.shape[3:])  # [B, T, N, ...] -> [B, T, G, R, ...]
    starts = jnp.zeros(x.shape[:2], bool) if is_start is None else is_start
    return Inputs(by_group(dt[..., None] * x), b, c, by_group(dt * for_each_token(a, dt.shape)), starts)
