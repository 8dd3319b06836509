"""Inputs of the recurrences, as their kernels take them."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from maxlib._xla_workarounds import inner, scaled
from maxlib.ops._recurrent.recurrence import Settings

EPS = 1e-6  # added to the squared norm of a query or key


class DeltaInputs(NamedTuple):
    """Inputs of a delta rule for each token.

    The gated delta rule groups value heads by key head; Kimi delta attention has N heads, a decay for each channel of a
    key, and always an array `is_start`.

    Args:
        q: Queries, `B T K Hk`, or `B T N Hk`.
        k: Keys, of the same shape.
        v: Values, `B T K G Hv`, of the G value heads that share a key head, or `B T N Hv`.
        log_decay: Logarithm of the factor on the state, `B T K G`, or `B T N Hk`, float32 or float64.
        beta: Step towards the value, `B T K G`, or `B T N`, float32 or float64.
        is_start: `B T`, True if the state before a token is zero; None if it never is.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    is_start: Any


def normalized(x: DeltaInputs, settings: Settings) -> DeltaInputs:
    """Returns the inputs in float32 or wider, with scaled queries, and queries and keys of unit norm if requested."""
    q, k, v = (a.astype(x.beta.dtype) for a in (x.q, x.k, x.v))
    if settings.l2_norm:
        q, k = _unit(q), _unit(k)
    return x._replace(q=q * settings.scale, k=k, v=v)


def _unit(x: Array) -> Array:
    """Scales each head to unit norm."""
    return scaled(x, jax.lax.rsqrt(inner(x, x) + EPS))


class SSDInputs(NamedTuple):
    """Inputs of state-space duality for each token.

    Args:
        x: Inputs in their own dtype, `B T G R P`, for the R heads that share a group.
        b: Input projections of the state, in their own dtype, `B T G S`.
        c: Output projections of the state, in their own dtype, `B T G S`.
        dt: Steps, float32 or float64, `B T G R`.
        log_decay: Logarithm of the factor on the state, float32 or float64, `B T G R`.
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
