"""The public function of state-space duality: checks its arguments and chooses an implementation."""

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
from maxlib.ops._fla import ssd as fla
from maxlib.ops._recurrences import Call
from maxlib.ops._ssd.chunked import SSDTiles, chunked
from maxlib.ops._ssd.dispatch import SSD
from maxlib.ops._ssd.inputs import prepare
from maxlib.ops._ssd.parallel import AxisName, across
from maxlib.ops._ssd.sequential import sequential

Shaped = jax.Array | jax.ShapeDtypeStruct


def ssd(
    x: Float[Array, "B T N P"],
    dt: Float[Array, "B T N"],
    a: Float[Array, " N"],
    b: Float[Array, "B T G S"],
    c: Float[Array, "B T G S"],
    *,
    d: Float[Array, " N"] | None = None,
    is_start: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N P S"] | None = None,
    axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Computes the recurrence of Mamba-2 by state-space duality (Dao & Gu 2024, arXiv:2405.21060).

    For each head and token: `S <- exp(dt a) S + dt x b^T`, `y = S c + d x`. The state is float32 (float64 for float64
    inputs), whatever the dtype of the inputs.

    Args:
      x: inputs, N heads of width P.
      dt: step of each token, at least 0 (after softplus).
      a: decay rate of each head, at most 0 (after `-exp`).
      b: input projections of the state, G groups, each shared by N / G consecutive heads.
      c: output projections of the state, G groups as for `b`.
      d: skip connection: factor of each head on its input, added to the output; None adds nothing.
      is_start: True for the first token of a document, before which the state is set to zero; None if every row
        continues `initial_state` (`nn.Context.is_start`).
      valid: False for padding, which does not change the state and outputs zero; None if every token is real.
      initial_state: state before the first token; None for zero.
      axis_name: mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.
      implementation: "sequential", token by token; "chunked", in matmuls; "jax_linear_attention", kernels for Hopper
          GPUs of that package; "fla", those of flash-linear-attention for other NVIDIA GPUs. None chooses the
          fastest; `explain_ssd` shows which one and why.

    Returns:
      The output, in the dtype of `x`, and the state after the last real token, for the next call.

    Raises:
      ValueError: when shapes do not agree, or the named implementation does not exist or cannot run the call.
    """
    _check(x, dt, a, b, c, d, is_start, valid, initial_state)
    found = SSD.choose(_describe(x, b), implementation)
    options = {"axis_name": axis_name, "run": (found.chosen, found.tiles and found.tiles.sizes)}
    return _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, **options)


def explain_ssd(
    x: Shaped,
    b: Shaped,
    *,
    implementation: str | None = None,
    device: tuple[str, str] | None = None,
) -> Explanation:
    """Explains which implementation `ssd` would run for these arguments, and why.

    Args:
      x: inputs, `B T N P`, an array or a `jax.ShapeDtypeStruct`.
      b: input projections of the state, `B T G S`, likewise.
      implementation: as in `ssd`.
      device: platform, and jax's `device_kind` or a short name, such as `("gpu", "H100")`; default: the device in use.

    Returns:
      An `Explanation`, which prints as a readable text. `chosen` is None if the named one cannot run the call.

    Raises:
      ValueError: when no implementation has this name, or the device is unknown.
    """
    return SSD.explain(_describe(x, b, explained_device(device)), implementation)


def _describe(x, b, device: tuple[str, str] | None = None) -> Call:
    (B, T, N, P), (G, S) = x.shape, b.shape[2:]
    platform, kind = device or current_device()
    tracked, letters = is_tracked(x, b), ("G", "N", "S", "P")
    return Call(B, T, G, N, S, P, str(x.dtype), platform, kind, tracked=tracked, letters=letters)


def _flops(x, b, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, N, P), (G, S) = x.shape, b.shape[2:]
    size = min(SSDTiles().chunk, T)
    # Per token: scores, per group; outputs within the chunk; reads of the state, and its update.
    return 2.0 * B * T * (G * size * S + N * (size * P + 2 * P * S))


@register_flops(_flops, static=("axis_name", "run"))
def _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, *, axis_name, run):
    (B, _, N, P), (G, S) = x.shape, b.shape[2:]
    inputs = prepare(x, b, c, dt, a, is_start, valid)
    shape, wide = (B, G, N // G, P, S), inputs.dt.dtype
    state = jnp.zeros(shape, wide) if initial_state is None else initial_state.reshape(shape).astype(wide)
    # A part of a split sequence also starts from zero; `across` adds what comes from the parts before it.
    how = jax_linear_attention.Run(x.dtype, is_start is not None, initial_state is None or axis_name is not None)
    run = _run(*run, how)
    out, state = run(inputs, state) if axis_name is None else across(run, inputs, state, axis_name=axis_name)
    out = out.reshape(x.shape)
    if d is not None:
        out = out + d.astype(wide)[None, None, :, None] * x.astype(wide)
    out = out.astype(x.dtype)
    out = out if valid is None else jnp.where(valid[:, :, None, None], out, 0)
    return out, state.reshape(B, N, P, S)


def _run(implementation: str, tiles: Any, how: jax_linear_attention.Run) -> Callable:
    """Returns a function of `Inputs` and a state that runs an implementation."""
    if implementation == "jax_linear_attention":
        return lambda x, state: jax_linear_attention.ssd(x, state, how)
    if implementation == "fla":
        return lambda x, state: fla.ssd(x, state, how)
    if implementation == "sequential":
        return sequential
    # Full precision takes six passes of a TPU's matmul unit. Narrow inputs do not need that, but sums over a document
    # need more than one pass.
    narrow = jnp.dtype(how.dtype).itemsize < 4
    precision = jax.lax.Precision.HIGH if narrow else jax.lax.Precision.HIGHEST
    return functools.partial(chunked, precision=precision, tiles=tiles)


def _check(x, dt, a, b, c, d, is_start, valid, initial_state) -> None:
    for name, part, axes in (("x", x, "B T N P"), ("b", b, "B T G S"), ("c", c, "B T G S")):
        _require(part.ndim == 4, f"{name} must have the axes {axes}", f"shape {part.shape}")
        _require(jnp.issubdtype(part.dtype, jnp.floating), f"{name} must be floating point", str(part.dtype))
    (B, T, N, P), (G, S) = x.shape, b.shape[2:]
    _require(c.shape == b.shape, "b and c must have the same shape", f"{b.shape} and {c.shape}")
    _require(b.shape[:2] == (B, T), "x, b and c must agree in B and T", f"{x.shape} and {b.shape}")
    _require(G > 0 and N % G == 0, "the N heads must be a multiple of the G groups", f"N={N} and G={G}")
    _require(T > 0, "there must be at least one token", "T=0")
    expected = {"dt": (dt, (B, T, N)), "a": (a, (N,)), "d": (d, (N,)), "is_start": (is_start, (B, T))}
    expected |= {"valid": (valid, (B, T)), "initial_state": (initial_state, (B, N, P, S))}
    for name, (part, shape) in expected.items():
        got = getattr(part, "shape", None)
        _require(part is None or got == shape, f"{name} must have the shape {shape}", f"{got}")


def _require(holds: bool, must: str, got: str) -> None:
    if not holds:
        raise ValueError(f"ssd: {must}, got {got}")
