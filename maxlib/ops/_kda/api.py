"""The public function of Kimi delta attention: checks its arguments and chooses an implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._utils.varying import is_tracked
from maxlib.hardware import current_device, explained_device
from maxlib.ops import _jax_linear_attention as jax_linear_attention
from maxlib.ops._cost import register_flops
from maxlib.ops._explanation import Explanation
from maxlib.ops._fla import kimi as fla
from maxlib.ops._gated_delta.parallel import AxisName, across
from maxlib.ops._kda.chunked import KimiTiles, chunked
from maxlib.ops._kda.dispatch import KIMI_DELTA
from maxlib.ops._kda.inputs import prepare, widened
from maxlib.ops._kda.sequential import sequential
from maxlib.ops._recurrences import Call

Shaped = jax.Array | jax.ShapeDtypeStruct


def kimi_delta_attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B T N Hk"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float[Array, "B T N Hk"],
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
    """Computes Kimi delta attention (Kimi Team 2025, arXiv:2510.26692), a gated delta rule with a decay per channel.

    For each head and token: `S <- diag(exp(log_decay)) S`, `S <- S + k (beta (v - k^T S))^T`, `o = q^T S`. The state is
    float32 (float64 for float64 inputs), whatever the dtype of the inputs.

    Args:
      q: queries, N heads.
      k: keys, N heads.
      v: values, N heads of any width.
      log_decay: logarithm of the factor on each row of the state, at most 0.
      beta: step towards the value, in [0, 1].
      is_start: True for the first token of a document, before which the state is set to zero; None if every row
        continues `initial_state` (`nn.Context.is_start`).
      valid: False for padding, which leaves the state as it is and has the output zero; None if every token is real.
      initial_state: state before the first token; None for zero.
      scale: factor on the queries; default `Hk ** -0.5`.
      l2_norm: divide each head of `q` and `k` by its length, with 1e-6 added to its square.
      axis_name: mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
      implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
          GPUs of that package; "fla", those of flash-linear-attention for other NVIDIA GPUs. None chooses the
          fastest; `explain_kimi_delta_attention` shows which one and why.

    Returns:
      The output, in the dtype of `v`, and the state after the last real token, for the next call.

    Raises:
      ValueError: when shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    _check(q, k, v, log_decay, beta, is_start, valid, initial_state)
    found = KIMI_DELTA.choose(_describe(q, v, axis_name), implementation)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    run = found.chosen, found.tiles and found.tiles.sizes
    options = {"scale": scale, "l2_norm": l2_norm, "axis_name": axis_name, "run": run}
    return _kda(q, k, v, log_decay, beta, is_start, valid, initial_state, **options)


def explain_kimi_delta_attention(
    q: Shaped,
    v: Shaped,
    *,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `kimi_delta_attention` would run for these arguments, and why.

    Args:
      q: queries, `B T N Hk`, an array or a `jax.ShapeDtypeStruct`.
      v: values, `B T N Hv`, likewise.
      axis_name: as in `kimi_delta_attention`.
      implementation: as in `kimi_delta_attention`.
      device: platform, and jax's `device_kind` or a short name, such as `("gpu", "H100")`; default: the device in use.

    Returns:
      An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
      ValueError: when no implementation has this name, or the device is unknown.
    """
    return KIMI_DELTA.explain(_describe(q, v, axis_name, explained_device(device)), implementation)


def _describe(q, v, axis_name, device: tuple[str, str] | None = None) -> Call:
    (B, T, N, Hk), Hv = q.shape, v.shape[-1]
    # A device with a part of the sequence computes its state transition along with its values.
    width = Hv if axis_name is None else Hv + Hk
    platform, kind = device or current_device()
    tracked, letters = is_tracked(q, v), ("N", "N", "Hk", "Hv")
    return Call(B, T, N, N, Hk, width, str(v.dtype), platform, kind, tracked=tracked, letters=letters)


def _flops(q, k, v, *_) -> float:
    """Counts the FLOPs of the chunked form, whichever runs: those of its matmuls, masked halves included."""
    (B, T, N, Hk), Hv = q.shape, v.shape[-1]
    size = min(KimiTiles().chunk, T)
    # Per token: products of keys and of queries; the solutions U and W, and outputs within the chunk; reads of the
    # state by W and by queries, and its update.
    return 2.0 * B * T * N * (2 * size * Hk + size * (Hk + 2 * Hv) + 3 * Hk * Hv)


@register_flops(_flops, static=("scale", "l2_norm", "axis_name", "run"))
def _kda(q, k, v, log_decay, beta, is_start, valid, initial_state, *, scale, l2_norm, axis_name, run):
    (B, _, N, Hk), Hv = q.shape, v.shape[-1]
    x = prepare(q, k, v, log_decay, beta, is_start, valid)
    shape, wide = (B, N, Hk, Hv), x.beta.dtype
    state = jnp.zeros(shape, wide) if initial_state is None else initial_state.astype(wide)
    how = jax_linear_attention.Run(v.dtype, is_start is not None, initial_state is None and axis_name is None)
    run = _run(*run, how, scale=scale, l2_norm=l2_norm)
    out, state = run(x, state) if axis_name is None else across(run, x, state, axis_name=axis_name)
    out = out.astype(v.dtype)
    return out if valid is None else jnp.where(valid[:, :, None, None], out, 0), state


def _run(implementation: str, tiles: Any, how: jax_linear_attention.Run, **norm: Any) -> Callable:
    """Returns a function of `Inputs` and a state that runs an implementation."""
    if implementation == "jax_linear_attention":
        return lambda x, state: jax_linear_attention.kimi(widened(x, **norm), state, how)
    if implementation == "fla":
        return lambda x, state: fla.kimi(widened(x, **norm), state, how)
    if implementation == "sequential":
        return lambda x, state: sequential(widened(x, **norm), state)
    # Narrow inputs do not deserve six passes of a TPU's matmul unit, but their sums over a document do deserve more
    # than one.
    narrow = jnp.dtype(how.dtype).itemsize < 4
    precision = jax.lax.Precision.HIGH if narrow else jax.lax.Precision.HIGHEST
    return functools.partial(chunked, precision=precision, tiles=tiles, **norm)


def _check(q, k, v, log_decay, beta, is_start, valid, initial_state) -> None:
    for name, x, axes in (("q", q, "B T N Hk"), ("v", v, "B T N Hv")):
        _require(x.ndim == 4, f"{name} must have the axes {axes}", f"shape {x.shape}")
        _require(jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating point", str(x.dtype))
    (B, T, N, Hk), Hv = q.shape, v.shape[-1]
    _require(v.shape[:3] == (B, T, N), "q and v must agree in B, T and N", f"{q.shape} and {v.shape}")
    _require(T > 0, "there must be at least one token", "T=0")
    expected = {"k": (k, q.shape), "log_decay": (log_decay, q.shape), "beta": (beta, (B, T, N))}
    expected |= {"is_start": (is_start, (B, T)), "valid": (valid, (B, T))}
    expected |= {"initial_state": (initial_state, (B, N, Hk, Hv))}
    for name, (x, shape) in expected.items():
        got = getattr(x, "shape", None)
        _require(x is None or got == shape, f"{name} must have the shape {shape}", f"{got}")


def _require(holds: bool, must: str, got: str) -> None:
    if not holds:
        raise ValueError(f"kimi_delta_attention: {must}, got {got}")
