"""Delta rules (also Kimi's) of a sequence that is split over devices, each with consecutive tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

AxisName = str | tuple[str, ...]


def across(run: Callable, x: Any, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies the recurrence to this device's tokens, after those of the devices before it.

    A part updates a state by an affine map, `S -> M S + L`. Each device computes M and L from its tokens, all devices
    gather them (`Hk (Hk + Hv)` numbers per head), and each computes the state before its part.

    Args:
      run: an implementation.
      x: inputs of this device's tokens, a named tuple with the values as `v`.
      state: state before the first token of the first device.
      axis_name: mesh axis over which the sequence is split.

    Returns:
      The outputs of this device's tokens, and the state after the last token of the last device.
    """
    local, transition = _effect(run, x, state)
    parts = jax.lax.all_gather((local, transition), axis_name)

    def join(state, part):
        local, transition = part
        return jnp.einsum("...de,...ev->...dv", transition, state, precision="highest") + local, state

    last, before = jax.lax.scan(join, state, parts)  # before: [devices, B, K, G, Hk, Hv]
    own = jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis_name), keepdims=False)
    return run(x, own)[0], last


def _effect(run: Callable, x: Any, like: Array) -> tuple[Array, Array]:
    """Returns the state `L` after this device's tokens from a zero state, and their transition `M`.

    One run gives both: for a second set of values, all zero, the state starts as the identity and ends as `M`.
    """
    width, key_dim = like.shape[-1], like.shape[-2]
    values = jnp.concatenate([x.v, jnp.zeros((*x.v.shape[:-1], key_dim), x.v.dtype)], axis=-1)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=like.dtype), (*like.shape[:-1], key_dim))
    _, both = run(x._replace(v=values), jnp.concatenate([jnp.zeros_like(like), identity], axis=-1))
    return both[..., :width], both[..., width:]
