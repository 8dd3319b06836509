"""Kernels of the package jax-linear-attention for Hopper GPUs (`maxlib[linear-attention]`), imported when first called.

The package has Pallas (Mosaic GPU) kernels in both passes for all three recurrences, which its authors test and measure
on an H100. Its public functions look for a GPU and refuse to be traced without one, so this module calls the functions
below them, of version 0.1. Chunks have 64 tokens; states and sums are float32, operands of matmuls bfloat16 or float16.

No factor of a decay overflows, however fast a head forgets:

- Gated delta rule and SSD: `exp(G[i] - G[j])` for j <= i of one document, masked before the exponential.
- Kimi delta attention: blocks of 16 tokens meet at a border between them, where both exponents are at most 0, and
  within a block factors of single tokens are multiplied. Only where no channel forgets more than `exp(-80)` within 16
  tokens does a block meet in its middle, with exponents of at most 80 in magnitude.

The gated delta rule inverts its triangular system without decays, `(I + strict_lower(beta k k^T))^-1`, and multiplies
the decays in afterwards. That is bounded for keys of unit norm and steps of at most 2, and for no others.
"""

import functools
import importlib.metadata
import re
from typing import Any

import jax.numpy as jnp
from jax import Array

from maxlib.hardware import is_hopper
from maxlib.ops._recurrent.recurrence import DeltaInputs, RecurrentCall, Settings, SSDInputs, normalized

INSTALL = "pip install 'maxlib[linear-attention]' on Python 3.12 or later"
VERSION = (0, 1)  # whose functions below the public ones are called here
CHUNK = 64
HALF = ("bfloat16", "float16")
MOST_CHUNKS = 65535  # blocks in a dimension of CUDA's grid
NARROW = ((64, 64), (64, 128), (128, 64), (128, 128))  # widths of keys and values that all three have kernels for
WIDE = ((128, 256), (256, 128), (256, 256), (256, 512))  # of the gated delta rule only


@functools.cache
def installed_version() -> tuple[int, ...] | None:
    """Returns the version of jax-linear-attention, without importing it; None if it is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jax-linear-attention"))))
    except importlib.metadata.PackageNotFoundError:
        return None


def _refuses(
    call: RecurrentCall, widths: tuple, dtypes: tuple[str, ...] = HALF, chunks: int = MOST_CHUNKS
) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None.

    Args:
        call: The call.
        widths: Widths of keys and values for which an operation has kernels.
        dtypes: Dtypes that they take.
        chunks: The most chunks in a row.
    """
    if not is_hopper(call.device_kind):
        return f"is for NVIDIA's Hopper (H100, H200, GH200, H800, H20), not for {call.device_kind}"
    if call.dtype not in dtypes:
        return f"takes values in {' or '.join(dtypes)}, not in {call.dtype}"
    if (call.key_dim, call.value_dim) not in widths:
        *some, last = (f"{key} x {value}" for key, value in widths)
        return f"takes states of {', '.join(some)} or {last}, not of {call.key_dim} x {call.value_dim}"
    if -(-call.tokens // CHUNK) > chunks:
        return f"takes at most {chunks * CHUNK} tokens in a row, not {call.tokens}"
    if call.tracked:
        return "does not say over which mesh axes its results vary: pass check_vma=False to jax.shard_map"
    if (version := installed_version()) is None:
        return f"is not installed: {INSTALL}"
    installed = ".".join(map(str, version))
    return None if version[:2] == VERSION else f"needs version 0.1 of jax-linear-attention, not {installed}"


def refuses_gated_delta(call: RecurrentCall) -> str | None:
    """Returns the reason why the gated delta rule cannot run a call, or None."""
    # Without decays, which it leaves out, the inverse for longer keys grows from token to token.
    if not call.l2_norm:
        return "is only stable for keys of unit norm: pass l2_norm=True"
    return _refuses(call, (*NARROW, *WIDE))


def refuses_kimi_delta(call: RecurrentCall) -> str | None:
    """Returns the reason why Kimi delta attention cannot run a call, or None."""
    if call.key_dim == 64 and call.heads % 2:
        return f"takes heads of 64 in pairs, not {call.heads} of them"
    # One kernel of the backward pass has a block for each half of a key's channels.
    return _refuses(call, NARROW, ("bfloat16",), MOST_CHUNKS // 2)


def refuses_ssd(call: RecurrentCall) -> str | None:
    """Returns the reason why state-space duality cannot run a call, or None."""
    return _refuses(call, NARROW)


def _options(settings: Settings, is_start: Array | None, state: Array) -> dict[str, Any]:
    """Returns the state before the first token and the documents of a call, as the package takes them.

    Args:
        settings: How the call runs.
        is_start: True for the first token of a document, `B T`.
        state: State before the first token, `B N Hk Hv`.
    """
    segments = None
    if settings.has_starts and is_start is not None:
        # The package resets states between tokens only, not before the first one.
        state = jnp.where(is_start[:, 0, None, None, None], 0, state)
        segments = jnp.cumsum(is_start, axis=1, dtype=jnp.int32)
    return {"initial_state": None if settings.starts_at_zero else state, "segment_ids": segments}


def gated_delta(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the gated delta rule, as `chunked` does."""
    from jla.ops.mosaic_gpu import scalar_gate, scalar_gate_kb

    x = normalized(x, settings)
    q, k, v = (a.astype(settings.dtype) for a in (x.q, x.k, _flat(x.v)))
    kernels = functools.partial(scalar_gate.run, delta=True)
    if scalar_gate_kb.handles(q, v):
        kernels = scalar_gate_kb.run
    options = _options(settings, x.is_start, _flat(state, 1))
    rates = _flat(x.log_decay), _flat(x.beta)
    out, last = kernels(q, k, v, *rates, scale=1.0, output_final_state=True, **options)
    return out.reshape(x.v.shape), last.reshape(state.shape)


def kimi_delta(x: DeltaInputs, state: Array, settings: Settings, *, interpret: bool = False) -> tuple[Array, Array]:
    """Applies Kimi delta attention, as `chunked` does; `interpret` runs it in Pallas's interpreter, on a CPU."""
    from jla.ops.mosaic_gpu import vector_gate_ops

    x = normalized(x, settings)
    q, k, v = (a.astype(settings.dtype) for a in (x.q, x.k, x.v))
    options = _options(settings, x.is_start, state)
    return vector_gate_ops.chunked_vector_gate(
        q, k, v, x.log_decay, (x.beta,), scale=1.0, **options, interpret=interpret
    )


def ssd(x: SSDInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies state-space duality, as `chunked` does."""
    from jla.ops.mosaic_gpu import scalar_gate

    # As linear attention: c are the queries, b the keys and x the values, `S <- exp(dt a) S + b (dt x)^T`.
    c, b, v = (a.astype(settings.dtype) for a in (x.c, x.b, _flat(x.stepped)))
    options = _options(settings, x.is_start, jnp.swapaxes(_flat(state, 1), -1, -2))
    options |= {"scale": 1.0, "output_final_state": True, "grouped_key_grads": True}
    out, last = scalar_gate.run(c, b, v, _flat(x.log_decay), None, delta=False, **options)
    return out.reshape(x.x.shape), jnp.swapaxes(last, -1, -2).reshape(state.shape)


def _flat(x: Array, axis: int = 2) -> Array:
    """Joins the axes of key heads, or groups, and of the heads of each."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
