"""Definition of Kimi delta attention, token by token: what the other form must equal, and the fast way to decode."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
from maxlib.ops._kda.inputs import Inputs


def sequential(x: Inputs, state: Array) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other.

    Args:
      x: what each token brings, float32 or float64.
      state: state before the first token, `B N Hk Hv`.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x)  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(_step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _step(state: Array, x: Inputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # S <- diag(exp(g)) S, or 0 where a document begins. [B, N, Hk] -> [B, N, Hk, 1]
    kept = jnp.where(x.is_start[:, None, None], 0.0, jnp.exp(x.log_decay))
    state = kept[..., None] * state
    # S <- S + k (beta (v - k^T S))^T: what the key stands for moves towards v by beta.
    found = jnp.einsum("bnd,bndv->bnv", x.k, state, precision="highest")
    delta = x.beta[..., None] * (x.v - found)
    state = state + x.k[..., None] * delta[..., None, :]
    # o = q^T S
    return state, jnp.einsum("bnd,bndv->bnv", x.q, state, precision="highest")
