"""The public function of state-space duality: checks its arguments and chooses an implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib.hardware import current_device
from maxlib.ops import _tuning
from maxlib.ops._cost import register_flops
from maxlib.ops._ssd.chunked import SSDTiles, chunked
from maxlib.ops._ssd.inputs import prepare
from maxlib.ops._ssd.parallel import AxisName, across
from maxlib.ops._ssd.sequential import sequential

IMPLEMENTATIONS = ("chunked", "sequential")
FEW = 8  # tokens up to which the recurrence is faster than a chunk


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
      implementation: "sequential", token by token; "chunked", in matmuls; None chooses the faster one.

    Returns:
      The output, in the dtype of `x`, and the state after the last real token, for the next call.

    Raises:
      ValueError: when shapes do not agree, or no implementation has this name.
    """
    _check(x, dt, a, b, c, d, is_start, valid, initial_state)
    if implementation is None:
        implementation = "sequential" if x.shape[1] <= FEW else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, or None, got {implementation!r}")
    key = _tuning.key_of({"T": x.shape[1]}, {"P": x.shape[3], "S": b.shape[3]})
    tiles = _tuning.choose(SSDTiles(), key, current_device()[1]).sizes
    options = {"axis_name": axis_name, "implementation": implementation, "tiles": tiles}
    return _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, **options)


def _flops(x, b, *_) -> float:
    """Counts the FLOPs of the chunked form's matmuls, including masked halves, for every implementation."""
    (B, T, N, P), (G, S) = x.shape, b.shape[2:]
    size = min(SSDTiles().chunk, T)
    # Per token: scores, per group; outputs within the chunk; reads of the state, and its update.
    return 2.0 * B * T * (G * size * S + N * (size * P + 2 * P * S))


@register_flops(_flops, static=("axis_name", "implementation", "tiles"))
def _ssd(x, b, c, dt, a, d, is_start, valid, initial_state, *, axis_name, implementation, tiles):
    (B, _, N, P), (G, S) = x.shape, b.shape[2:]
    inputs = prepare(x, b, c, dt, a, is_start, valid)
    shape, wide = (B, G, N // G, P, S), inputs.x.dtype
    state = jnp.zeros(shape, wide) if initial_state is None else initial_state.reshape(shape).astype(wide)
    run = _run(implementation, x.dtype, tiles)
    out, state = run(inputs, state) if axis_name is None else across(run, inputs, state, axis_name=axis_name)
    out = out.reshape(x.shape)
    if d is not None:
        out = out + d.astype(wide)[None, None, :, None] * x.astype(wide)
    out = out.astype(x.dtype)
    out = out if valid is None else jnp.where(valid[:, :, None, None], out, 0)
    return out, state.reshape(B, N, P, S)


def _run(implementation: str, dtype: Any, tiles: SSDTiles):
    if implementation == "sequential":
        return sequential
    # Full precision takes six passes of a TPU's matmul unit. Narrow inputs do not need that, but sums over a document
    # need more than one pass.
    narrow = jnp.dtype(dtype).itemsize < 4
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
