"""Recurrences of a sequence that is split over devices, each with consecutive tokens.

Every device computes what its tokens do to a state, all devices gather that, and each computes the state before its
part.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._recurrent.recurrence import AxisName


def delta_across_devices(run: Callable, x: Any, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies a delta rule to this device's tokens, after those of the devices before it.

    A part updates a state by an affine map, `S -> M S + L`. Devices gather `Hk (Hk + Hv)` numbers per head.

    Args:
        run: A kernel, a function of inputs and a state.
        x: Inputs of this device's tokens, a named tuple with the values as `v`.
        state: State before the first token of the first device.
        axis_name: Mesh axis over which the sequence is split.

    Returns:
        The outputs of this device's tokens, and the state after the last token of the last device.
    """

    def join(state, part):
        local, transition = part
        return jnp.einsum("...de,...ev->...dv", transition, state, precision="highest") + local, state

    before, last = _pass_on(join, state, _effect(run, x, state), axis_name)  # [B, K, G, Hk, Hv]
    return run(x, before)[0], last


def _effect(run: Callable, x: Any, like: Array) -> tuple[Array, Array]:
    """Returns the state `L` after this device's tokens from a zero state, and their transition `M`.

    One run gives both: for a second set of values, all zero, the state starts as the identity and ends as `M`.
    """
    width, key_dim = like.shape[-1], like.shape[-2]
    values = jnp.concatenate([x.v, jnp.zeros((*x.v.shape[:-1], key_dim), x.v.dtype)], axis=-1)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=like.dtype), (*like.shape[:-1], key_dim))
    _, both = run(x._replace(v=values), jnp.concatenate([jnp.zeros_like(like), identity], axis=-1))
    return both[..., :width], both[..., width:]


def ssd_across_devices(run: Callable, x: Any, state: Array, *, axis_name: AxisName) -> tuple[Array, Array]:
    """Applies state-space duality to this device's tokens, after those of the devices before it.

    A part updates a state by `S -> m S + L` with one number m per head. Each device computes its outputs and L from a
    zero state, and adds the contribution of the state before its part to the outputs.

    Args:
        run: A kernel, a function of inputs and a state.
        x: Inputs of this device's tokens.
        state: State before the first token of the first device, `B G R P S`.
        axis_name: Mesh axis over which the sequence is split.

    Returns:
        The outputs of this device's tokens, and the state after the last token of the last device.
    """
    out, local = run(x, jnp.zeros_like(state))
    # The decay from the state before this part to each of its tokens, [B, T, G, R]; 0 once a document has begun.
    first = jnp.cumsum(x.is_start, axis=1)[:, :, None, None] == 0
    into = jnp.exp(jnp.where(first, jnp.cumsum(x.log_decay, axis=1), -jnp.inf))

    def join(state, part):
        local, decay = part
        return decay[..., None, None] * state + local, state

    before, last = _pass_on(join, state, (local, into[:, -1]), axis_name)  # [B, G, R, P, S]
    read = jnp.einsum("btgs,bgrps->btgrp", x.c.astype(before.dtype), before, precision="highest")
    return out + into[..., None] * read, last


def _pass_on(join: Callable, state: Array, effect: Any, axis_name: AxisName) -> tuple[Array, Array]:
    """Returns the state before this device's part, and the state after the last part."""
    last, before = jax.lax.scan(join, state, jax.lax.all_gather(effect, axis_name))
    return jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis_name), keepdims=False), last
