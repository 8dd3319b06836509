"""Gated delta rule token by token: the reference for the other forms, and the fastest way to decode."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._gated_delta.inputs import Inputs
from maxlib.ops._varying import vary_alike


def sequential(x: Inputs, state: Array) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other.

    Args:
      x: inputs of each token, float32 or float64.
      state: state before the first token, `B K G Hk Hv`.

    Returns:
      The outputs, `B T K G Hv`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x)  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(_step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _step(state: Array, x: Inputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # S <- exp(g) S, or 0 at the start of a document. [B, K, G] -> [B, K, G, 1, 1]
    kept = jnp.exp(x.log_decay)
    kept = kept if x.is_start is None else jnp.where(x.is_start[:, None, None], 0.0, kept)
    state = kept[..., None, None] * state
    # S <- S + k (beta (v - k^T S))^T: the value stored under k moves towards v by beta.
    found = jnp.einsum("bkd,bkgdv->bkgv", x.k, state, precision="highest")
    delta = x.beta[..., None] * (x.v - found)
    state = state + x.k[:, :, None, :, None] * delta[..., None, :]
    # o = q^T S
    return state, jnp.einsum("bkd,bkgdv->bkgv", x.q, state, precision="highest")
