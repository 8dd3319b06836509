"""State-space duality of a sequence that is split over devices, each with consecutive tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._ssd.inputs import Inputs

AxisName = str | tuple[str, ...]


def across(run: Callable, x: Inputs, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies the recurrence to this device's tokens, after those of the devices before it.

    A part updates a state by `S -> m S + L` with one number m per head. Each device computes its outputs and L from a
    zero state. All devices gather m and L; each computes the state before its part and adds its contribution to the
    outputs.

    Args:
      run: an implementation.
      x: inputs of this device's tokens.
      state: state before the first token of the first device, `B G R P S`.
      axis_name: mesh axis over which the sequence is split.

    Returns:
      The outputs of this device's tokens, and the state after the last token of the last device.
    """
    out, local = run(x, jnp.zeros_like(state))
    into = _into(x)  # [B, T, G, R]
    parts = jax.lax.all_gather((local, into[:, -1]), axis_name)

    def join(state, part):
        local, kept = part
        return kept[..., None, None] * state + local, state

    last, before = jax.lax.scan(join, state, parts)  # before: [devices, B, G, R, P, S]
    own = jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis_name), keepdims=False)
    read = jnp.einsum("btgs,bgrps->btgrp", x.c.astype(own.dtype), own, precision="highest")
    return out + into[..., None] * read, last


def _into(x: Inputs) -> Array:
    """Returns the decay from the state before this part to each of its tokens, `B T G R`."""
    first = jnp.cumsum(x.is_start, axis=1)[:, :, None, None] == 0  # True for the document that began in an earlier part
    return jnp.exp(jnp.where(first, jnp.cumsum(x.log_decay, axis=1), -jnp.inf))
