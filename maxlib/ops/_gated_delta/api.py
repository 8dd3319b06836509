"""The public function of the gated delta rule: checks its arguments and chooses an implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._utils.varying import is_tracked
from maxlib.hardware import current_device, explained_device
from maxlib.kernels.gated_delta import mosaic_tpu
from maxlib.ops import _jax_linear_attention as jax_linear_attention
from maxlib.ops._cost import register_flops
from maxlib.ops._explanation import Explanation
from maxlib.ops._fla import gated_delta as fla
from maxlib.ops._gated_delta.chunked import DeltaTiles, chunked
from maxlib.ops._gated_delta.dispatch import GATED_DELTA
from maxlib.ops._gated_delta.inputs import grouped, widened
from maxlib.ops._gated_delta.parallel import AxisName, across
from maxlib.ops._gated_delta.sequential import sequential
from maxlib.ops._recurrences import Call

Shaped = jax.Array | jax.ShapeDtypeStruct


def gated_delta_rule(
    q: Float[Array, "B T K Hk"],
    k: Float[Array, "B T K Hk"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    is_start: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N Hk Hv"] | None = None,
    scale: float | None = None,
    l2_norm: bool = True,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N Hk Hv"]]:
    """Computes the gated delta rule (Yang et al. 2024, arXiv:2412.06464), linear attention with a matrix as state.

    For each value head and token: `S <- exp(log_decay) S`, `S <- S + k (beta (v - k^T S))^T`, `o = q^T S`. The state is
    float32 (float64 for float64 inputs), whatever the dtype of the inputs.

    Args:
      q: queries, K heads.
      k: keys, K heads; each is shared by N / K consecutive value heads.
      v: values, N heads of any width.
      log_decay: logarithm of the factor on the state, at most 0.
      beta: step towards the value, in [0, 1], or in [0, 2] to allow negative eigenvalues.
      is_start: True for the first token of a document, before which the state is set to zero; None if every row
        continues `initial_state` (`nn.Context.is_start`).
      valid: False for padding, which does not change the state and outputs zero; None if every token is real.
      initial_state: state before the first token; None for zero.
      scale: factor on the queries; default `Hk ** -0.5`.
      l2_norm: True divides each head of `q` and `k` by its L2 norm, with 1e-6 added to the squared norm.
      axis_name: mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
      implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
          GPUs of that package; "fla", those of flash-linear-attention for other NVIDIA GPUs; "mosaic_tpu", TPU
          kernels, by name only because no TPU has run them yet. None chooses the fastest;
          `explain_gated_delta_rule` shows which one and why.

    Returns:
      The output, in the dtype of `v`, and the state after the last real token, for the next call.

    Raises:
      ValueError: when shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    _check(q, k, v, log_decay, beta, is_start, valid, initial_state)
    found = GATED_DELTA.choose(_describe(q, v, l2_norm, axis_name), implementation)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {
        "scale": scale,
        "l2_norm": l2_norm,
        "axis_name": axis_name,
        "run": (found.chosen, found.tiles and found.tiles.sizes),
    }
    return _gated_delta_rule(q, k, v, log_decay, beta, is_start, valid, initial_state, **options)


def explain_gated_delta_rule(
    q: Shaped,
    v: Shaped,
    *,
    l2_norm: bool = True,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `gated_delta_rule` would run for these arguments, and why.

    Args:
      q: queries, `B T K Hk`, an array or a `jax.ShapeDtypeStruct`.
      v: values, `B T N Hv`, likewise.
      l2_norm: as in `gated_delta_rule`.
      axis_name: as in `gated_delta_rule`.
      implementation: as in `gated_delta_rule`.
      device: platform, and jax's `device_kind` or a short name, such as `("tpu", "v5p")`; default: the device in use.

    Returns:
      An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
      ValueError: when no implementation has this name, or the device is unknown.
    """
    return GATED_DELTA.explain(_describe(q, v, l2_norm, axis_name, explained_device(device)), implementation)


def _describe(q, v, l2_norm, axis_name, device: tuple[str, str] | None = None) -> Call:
    (B, T, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    # A device with a part of the sequence computes its state transition along with its values.
    width = Hv if axis_name is None else Hv + Hk
    platform, kind = device or current_device()
    return Call(B, T, K, N, Hk, width, str(v.dtype), platform, kind, l2_norm, is_tracked(q, v))


def _flops(q, k, v, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    size = min(DeltaTiles().chunk, T)
    # Per token: scores of keys and queries, per key head; the solutions U and W, and outputs within the chunk; reads
    # of the state by W and by queries, and its update.
    return 2.0 * B * T * (K * 2 * size * Hk + N * (size * (Hk + 2 * Hv) + 3 * Hk * Hv))


@register_flops(_flops, static=("scale", "l2_norm", "axis_name", "run"))
def _gated_delta_rule(q, k, v, log_decay, beta, is_start, valid, initial_state, *, scale, l2_norm, axis_name, run):
    (B, _, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    x = grouped(q, k, v, log_decay, beta, is_start, valid)
    shape, wide = (B, K, N // K, Hk, Hv), x.beta.dtype
    state = jnp.zeros(shape, wide) if initial_state is None else initial_state.reshape(shape).astype(wide)
    how = jax_linear_attention.Run(v.dtype, is_start is not None, initial_state is None and axis_name is None)
    run = _run(*run, how, scale=scale, l2_norm=l2_norm)
    out, state = run(x, state) if axis_name is None else across(run, x, state, axis_name=axis_name)
    out = out.reshape(v.shape).astype(v.dtype)
    out = out if valid is None else jnp.where(valid[:, :, None, None], out, 0)
    return out, state.reshape(B, N, Hk, Hv)


def _run(implementation: str, tiles: Any, how: jax_linear_attention.Run, **norm: Any) -> Callable:
    """Returns a function of `Inputs` and a state that runs an implementation."""
    # The kernels take inputs in their own dtype, which halves memory traffic compared with float32, and normalize
    # queries and keys on chip.
    if implementation == "mosaic_tpu":
        kernels = functools.partial(mosaic_tpu, **norm, tiles=tiles)
        return lambda x, state: kernels(
            *x[:5], jnp.zeros(x.q.shape[:2], bool) if x.is_start is None else x.is_start, state
        )
    if implementation == "jax_linear_attention":
        return lambda x, state: jax_linear_attention.gated_delta(widened(x, **norm), state, how)
    if implementation == "fla":
        return lambda x, state: fla.gated_delta(widened(x, **norm), state, how)
    if implementation == "sequential":
        return lambda x, state: sequential(widened(x, **norm), state)
    # Full precision takes six passes of a TPU's matmul unit. Narrow inputs do not need that, but sums over a document
    # need more than one pass.
    narrow = jnp.dtype(how.dtype).itemsize < 4
    precision = jax.lax.Precision.HIGH if narrow else jax.lax.Precision.HIGHEST
    return functools.partial(chunked, precision=precision, tiles=tiles, **norm)


def _check(q, k, v, log_decay, beta, is_start, valid, initial_state) -> None:
    for name, x, axes in (("q", q, "B T K Hk"), ("k", k, "B T K Hk"), ("v", v, "B T N Hv")):
        _require(x.ndim == 4, f"{name} must have the axes {axes}", f"shape {x.shape}")
        _require(jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating point", str(x.dtype))
    (B, T, K, Hk), (N, Hv) = q.shape, v.shape[2:]
    _require(k.shape == q.shape, "q and k must have the same shape", f"{q.shape} and {k.shape}")
    _require(v.shape[:2] == (B, T), "q, k and v must agree in B and T", f"{q.shape} and {v.shape}")
    _require(K > 0 and N % K == 0, "the N value heads must be a multiple of the K key heads", f"N={N} and K={K}")
    _require(T > 0, "there must be at least one token", "T=0")
    expected = {"log_decay": (log_decay, (B, T, N)), "beta": (beta, (B, T, N)), "is_start": (is_start, (B, T))}
    expected |= {"valid": (valid, (B, T)), "initial_state": (initial_state, (B, N, Hk, Hv))}
    for name, (x, shape) in expected.items():
        _require(x is None or x.shape == shape, f"{name} must have the shape {shape}", f"{getattr(x, 'shape', None)}")


def _require(holds: bool, must: str, got: str) -> None:
    if not holds:
        raise ValueError(f"gated_delta_rule: {must}, got {got}")
