"""maxlib's kernels for TPUs (`maxlib.kernels.recurrent`), imported when first called.

They have run in Pallas's interpreter and were compiled for v5e, v5p and v6e, but no TPU has run them.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from maxlib.kernels.recurrent.tiles import LANES, MosaicTpuTiles, Shares
from maxlib.kernels.tile_sizes import chosen_tiles
from maxlib.ops._dispatch import Kernel
from maxlib.ops._recurrent.recurrence import DeltaInputs, RecurrentCall, Settings, SSDInputs

BY_NAME = "no TPU has run it yet"
DTYPES = ("bfloat16", "float32")


def kernel(run: Callable) -> Kernel:
    """Returns the row of a table of kernels for one of the two functions below."""
    about = "maxlib's kernels for TPUs, in both passes, with states in vector memory"
    return Kernel("mosaic_tpu", run, about, frozenset({"tpu"}), refuses=refuses, by_name=BY_NAME, tiles=tiles)


def tiles(call: RecurrentCall) -> MosaicTpuTiles:
    """Returns the default sizes, the same for every call."""
    return MosaicTpuTiles()


def refuses(call: RecurrentCall) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None."""
    if call.dtype not in DTYPES:
        return f"takes values in {' or '.join(DTYPES)}, not in {call.dtype}"
    if call.key_dim % LANES:
        return f"takes keys whose width is a multiple of {LANES}, not {call.key_dim}"
    if Shares.of(call.key_heads, call.heads, call.value_dim, chosen_tiles(MosaicTpuTiles()).columns) is None:
        group = call.heads // call.key_heads
        return (
            f"takes values of {LANES} columns or a multiple in each key head's heads, not {group} of {call.value_dim}"
        )
    if call.tracked:
        return "does not say over which mesh axes its results vary: pass check_vma=False to jax.shard_map"
    return None


def gated_delta(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the gated delta rule, as `chunked` does."""
    rates = _flat(x.log_decay), _flat(x.beta)
    turned = jnp.swapaxes(_flat(state, 1), -1, -2)  # [B, K, G, Hk, Hv] -> [B, N, Hv, Hk]
    out, last = _run(settings, True, (x.q, x.k, _flat(x.v)), rates, x.is_start, turned)
    return out.reshape(x.v.shape), jnp.swapaxes(last, -1, -2).reshape(state.shape)


def ssd(x: SSDInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies state-space duality, as `chunked` does: c are the queries, b the keys, x the values and dt the steps."""
    rates = _flat(x.log_decay), _flat(x.dt)
    out, last = _run(settings, False, (x.c, x.b, _flat(x.x)), rates, x.is_start, _flat(state, 1))
    return out.reshape(x.x.shape), last.reshape(state.shape)


def _run(settings: Settings, delta: bool, qkv: Any, rates: Any, is_start: Array | None, state: Array):
    from maxlib.kernels.recurrent.chunk import START, Form
    from maxlib.kernels.recurrent.mosaic_tpu import recurrence

    log_decay, beta = rates
    if settings.has_starts and is_start is not None:
        log_decay = jnp.where(is_start[:, :, None], START, log_decay)
    q, k, v = (a.astype(settings.dtype) for a in qkv)
    form = Form(delta, settings.l2_norm, settings.scale, settings.dtype == jnp.float32)
    return recurrence(form, q, k, v, log_decay, beta, state, cast(MosaicTpuTiles, settings.tiles))


def _flat(x: Array, axis: int = 2) -> Array:
    """Joins the axes of key heads, or groups, and of the heads of each."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
