"""State-space duality token by token: the reference for the chunked form, and the fastest way to decode."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
from maxlib.ops._ssd.inputs import Inputs


def sequential(x: Inputs, state: Array) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other.

    Args:
      x: inputs of each token, rates in float32 or float64.
      state: state before the first token, `B G R P S`.

    Returns:
      The outputs, `B T G R P`, and the state after the last token.
    """
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x)  # [B, T, ...] -> [T, B, ...]
    tokens, state = vary_alike((tokens, state))
    state, out = jax.lax.scan(_step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _step(state: Array, x: Inputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # exp(dt a), or 0 at the start of a document. [B, G, R] -> [B, G, R, 1, 1]
    kept = jnp.where(x.is_start[:, None, None], 0.0, jnp.exp(x.log_decay))[..., None, None]
    # S <- exp(dt a) S + (dt x) b^T: [B, G, R, P, 1] [B, G, 1, 1, S]
    b, c = x.b.astype(state.dtype), x.c.astype(state.dtype)
    state = kept * state + x.stepped[..., None] * b[:, :, None, None, :]
    # y = S c
    return state, jnp.einsum("bgrps,bgs->bgrp", state, c, precision="highest")
