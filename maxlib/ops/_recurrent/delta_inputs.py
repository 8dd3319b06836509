"""Inputs of the gated delta rule and of Kimi delta attention, and the norm of their queries and keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._xla_workarounds import inner, scaled
from maxlib.ops._recurrent.recurrence import Settings, check_floating, check_shapes, require

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


def check_inputs(op: str, q, k, v, log_decay, beta, is_start, valid, initial_state, *, by_channel: bool) -> None:
    """Raises ValueError unless shapes agree; `by_channel` if every channel of a key has its own decay."""
    check_floating(op, q=(q, "B T K Hk"), k=(k, "B T K Hk"), v=(v, "B T N Hv"))
    (B, T, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    require(op, k.shape == q.shape, "q and k must have the same shape", f"{q.shape} and {k.shape}")
    require(op, v.shape[:2] == (B, T), "q, k and v must agree in B and T", f"{q.shape} and {v.shape}")
    if by_channel:
        require(op, K == N, "q and v must have the same heads", f"{q.shape} and {v.shape}")
    require(op, K > 0 and N % K == 0, "the N value heads must be a multiple of the K key heads", f"N={N} and K={K}")
    require(op, T > 0, "there must be at least one token", "T=0")
    check_shapes(
        op,
        log_decay=(log_decay, q.shape if by_channel else (B, T, N)),
        beta=(beta, (B, T, N)),
        is_start=(is_start, (B, T)),
        valid=(valid, (B, T)),
        initial_state=(initial_state, (B, N, Hk, Hv)),
    )


def prepare(q, k, v, log_decay, beta, is_start, valid) -> DeltaInputs:
    """Returns the inputs with rates in float32 or wider, and padding that does not change the state."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    log_decay, beta = log_decay.astype(wide), beta.astype(wide)
    if valid is not None:
        # A token with a log decay of 0 and a step of 0 does not change the state.
        log_decay = jnp.where(valid.reshape(*valid.shape, *[1] * (log_decay.ndim - 2)), log_decay, 0.0)
        beta = jnp.where(valid[:, :, None], beta, 0.0)
    return DeltaInputs(q, k, v, log_decay, beta, is_start)


def normalized(x: DeltaInputs, settings: Settings) -> DeltaInputs:
    """Returns the inputs in float32 or wider, with scaled queries, and queries and keys of unit norm if requested."""
    q, k, v = (a.astype(x.beta.dtype) for a in (x.q, x.k, x.v))
    if settings.l2_norm:
        q, k = _unit(q), _unit(k)
    return x._replace(q=q * settings.scale, k=k, v=v)


def _unit(x: Array) -> Array:
    """Scales each head to unit norm."""
    return scaled(x, jax.lax.rsqrt(inner(x, x) + EPS))
