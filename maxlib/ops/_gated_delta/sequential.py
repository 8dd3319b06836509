"""Gated delta rule token by token: the reference for the other forms, and the fastest way to decode."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
from maxlib._xla_workarounds import inner, stored
from maxlib.ops._chunks import for_each_head
from maxlib.ops._gated_delta.inputs import Inputs


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
    """Reads the state with one token, and updates it."""
    # exp(g), or 0 at the start of a document. [B, K, G] -> [B, K, G, 1, 1]
    kept = jnp.exp(x.log_decay)
    kept = kept if x.is_start is None else jnp.where(x.is_start[:, None, None], 0.0, kept)
    kept = kept[..., None, None]
    # Key and query read the old state at once, exp(g) k^T S and exp(g) q^T S: a step passes over the state twice, once
    # to read and once to write. [B, K, G, 2, Hk] [B, K, G, Hk, Hv] -> [B, K, G, 2, Hv]
    both = stored(jnp.stack([x.k, x.q], axis=2))  # B K 2 Hk
    k, q = both[:, :, 0], both[:, :, 1]
    rows = for_each_head(both[None], state.shape[2])[0]
    read = kept * jnp.einsum("bkgrd,bkgdv->bkgrv", rows, state, precision="highest")
    found, out = read[..., 0, :], read[..., 1, :]
    # S <- exp(g) S + k (beta (v - exp(g) k^T S))^T: the value stored under k moves towards v by beta.
    delta = stored(x.beta[..., None] * (x.v - found))
    state = kept * state + k[:, :, None, :, None] * delta[..., None, :]
    # o = q^T S = exp(g) q^T S_old + (q^T k) delta
    return state, out + inner(q, k)[:, :, None, None] * delta
