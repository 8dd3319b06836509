"""Inputs of the implementations of state-space duality: heads grouped, padding without effect."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from maxlib._xla_workarounds import for_each_token


class Inputs(NamedTuple):
    """Inputs of the recurrence for each token.

    Args:
      x: inputs in their own dtype, `B T G R P`, for the R heads that share a group.
      b: input projections of the state, in their own dtype, `B T G S`.
      c: output projections of the state, in their own dtype, `B T G S`.
      dt: steps, float32 or float64, `B T G R`.
      log_decay: logarithm of the factor on the state, float32 or float64, `B T G R`.
      is_start: `B T`, True if the state before a token is zero.
    """

    x: Array
    b: Array
    c: Array
    dt: Array
    log_decay: Array
    is_start: Array

    @property
    def stepped(self) -> Array:
        """Inputs times their steps, in the dtype of the steps."""
        return self.dt[..., None] * self.x.astype(self.dt.dtype)


def prepare(x, b, c, dt, a, is_start, valid) -> Inputs:
    """Returns the inputs with heads grouped, rates in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dt, a = dt.astype(wide), a.astype(wide)
    if valid is not None:
        # A step of zero does not change the state.
        dt = jnp.where(valid[:, :, None], dt, 0.0)
    by_group = lambda y: y.reshape(*y.shape[:2], b.shape[2], -1, *y.shape[3:])  # [B, T, N, ...] -> [B, T, G, R, ...]
    starts = jnp.zeros(x.shape[:2], bool) if is_start is None else is_start
    return Inputs(by_group(x), b, c, by_group(dt), by_group(dt * for_each_token(a, dt.shape)), starts)
