"""State-space duality by the package's kernels of linear attention with a decay for each head (simple_gla).

With `q = c`, `k = b` and `v = dt x` the recurrence is `S <- exp(g) S + k v^T`, `o = q^T S`. The kernels of states take
as many heads of keys as of values, so `b` and `c` are repeated for the heads of a group while these run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxlib.ops._fla.launch import Tile, array, launch, over_rows, quiet
from maxlib.ops._fla.tokens import CHUNK, LN2, in_chunks, joined, per_group, per_head, sizes, summed
from maxlib.ops._jax_linear_attention import Run

STATES = Tile(warps=4, stages=2)
OUTPUTS = Tile(warps=4, stages=3)
GRADIENTS = Tile(warps=4, stages=2)


def ssd(x: Any, state: Array, run: Run) -> tuple[Array, Array]:
    """Applies state-space duality.

    Args:
      x: inputs of SSD: x `B T G R P`, b and c `B T G S`, dt and log_decay `B T G R`.
      state: state before the first token, `B G R P S`.
      run: how the call is run.

    Returns:
      The outputs, `B T G R P`, and the state after the last token.
    """
    c, b, v = (in_chunks(a.astype(run.dtype)) for a in (x.c, x.b, joined(x.stepped)))
    g = summed(joined(x.log_decay), x.is_start if run.documents else None)
    first = None if run.fresh else jnp.swapaxes(joined(state, 1), -1, -2).astype(jnp.float32)
    out, last = simple_gla(c, b, v, g, first)
    out = out[:, : x.x.shape[1]].reshape(x.x.shape)
    return out, jnp.swapaxes(last, -1, -2).reshape(state.shape)


@jax.custom_vjp
def simple_gla(q: Array, k: Array, v: Array, g: Array, state: Array | None) -> tuple[Array, Array]:
    """Applies linear attention with a decay for each head.

    Args:
      q: queries, `B T K Hk`, T a multiple of 64.
      k: keys, `B T K Hk`; each is shared by N / K consecutive heads.
      v: values, `B T N Hv`.
      g: logarithms of decays to the base 2, summed within chunks, `B T N`, float32.
      state: state before the first token, `B N Hk Hv`, float32; None for zero.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token, float32.
    """
    return _forward(q, k, v, g, state)


@over_rows
def _forward(q: Array, k: Array, v: Array, g: Array, state: Array | None):
    h, last = _states(k, v, g, state, q.dtype)
    return outputs(q, k, v, h, g), last


def outputs(q: Array, k: Array, v: Array, h: Array, g: Array) -> Array:
    """Reads states and the tokens of the same chunk, for each query.

    Args:
      q: queries, `B T K Hk`.
      k: keys, `B T K Hk`.
      v: what each token adds to the state, `B T N Hv`.
      h: state before each chunk, `B C N Hk Hv`.
      g: sums of logarithms of decays, `B T N`.
    """
    with quiet():
        from fla.ops.common.chunk_o import chunk_fwd_kernel_o

    (B, T, N, V), how = v.shape, sizes(k, v)
    grid = (-(-V // OUTPUTS.BV) * (T // CHUNK), B * N)
    pointers = {"q": q, "k": k, "v": v, "h": h, "g": g}
    return launch(chunk_fwd_kernel_o, grid, OUTPUTS, {"o": array(v.shape, v.dtype)}, **pointers, scale=1.0, **how)[0]


def _states(k: Array, v: Array, g: Array, state: Array | None, dtype: Any) -> tuple[Array, Array]:
    """Returns the state before each chunk, in a dtype, and the one after the last token."""
    with quiet():
        from fla.ops.common.chunk_h import chunk_fwd_kernel_h

    # This kernel reads keys by the number of a head of values.
    B, T, N, V = v.shape
    k = per_head(k, N)
    state_shape = (N, k.shape[-1], V)
    out = {"h": array((B, T // CHUNK, *state_shape), dtype), "ht": array((B, *state_shape), jnp.float32)}
    pointers = {"k": k, "v": v, "g": g, "h0": state}
    return launch(chunk_fwd_kernel_h, _grid(k, v), STATES, out, **pointers, **_constants(k, v))


def _d_states(q: Array, d_o: Array, g: Array, state: Array | None, d_last: Array) -> tuple[Array, Array | None]:
    """Returns the gradients of the states after each chunk, and of the state before the first token."""
    with quiet():
        from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

    B, T, N, V = d_o.shape
    q = per_head(q, N)
    out = {"dh": array((B, T // CHUNK, N, q.shape[-1], V), jnp.float32)}
    out |= {} if state is None else {"dh0": array(state.shape, jnp.float32)}
    pointers = {"q": q, "g": g, "do": d_o, "dht": d_last}
    how = _constants(q, d_o) | {"HQ": N, "NG": 1, "scale": 1.0}
    found = launch(chunk_bwd_kernel_dh, _grid(q, d_o), STATES, out, **pointers, **how)
    return found[0], None if state is None else found[1]


def _grid(k: Array, v: Array) -> tuple[int]:
    blocks = -(-k.shape[-1] // STATES.BK) * -(-v.shape[-1] // STATES.BV)
    return (blocks * v.shape[0] * v.shape[2],)


def _constants(k: Array, v: Array) -> dict[str, Any]:
    return sizes(k, v) | {"BS": CHUNK, "USE_G": True, "USE_G_GAMMA": False, "USE_GK": False, "USE_GV": False}


def _kept(q, k, v, g, state):
    return _forward(q, k, v, g, state), (q, k, v, g, state)


def _backward(kept, d_out):
    return _gradients(*kept, *d_out)


@over_rows
def _gradients(q, k, v, g, state, d_o, d_last):
    d_o, d_last = d_o.astype(v.dtype), d_last.astype(jnp.float32)
    # As in the package, states are computed anew, now in float32.
    h, _ = _states(k, v, g, state, jnp.float32)
    dh, d_state = _d_states(q, d_o, g, state, d_last)
    dq, dk, dg, _ = d_tokens(q, k, v, g, h, d_o, dh)
    return dq, dk, _d_values(q, k, g, d_o, dh), LN2 * dg, d_state


def d_tokens(q, k, v, g, h, d_o, dh, **delta: Array) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of queries, keys and sums of decays (natural logarithms).

    Args:
      q: queries, `B T K Hk`.
      k: keys, `B T K Hk`.
      v: what each token adds to the state, `B T N Hv`.
      g: sums of logarithms of decays, `B T N`.
      h: state before each chunk, `B C N Hk Hv`.
      d_o: gradient of the outputs, `B T N Hv`.
      dh: gradient of the state after each chunk, `B C N Hk Hv`.
      delta: for the delta rule `dv`, the gradient of `v`.

    Returns:
      The gradients of q and k as these are, of g in float32, and for the delta rule that of `w`, `B T N Hk`.
    """
    with quiet():
        from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg

    (B, T, N, _), S = v.shape, k.shape[-1]
    # Each part of a key's channels adds a term to the gradients of decays.
    parts = -(-S // GRADIENTS.BK)
    per_key = array((B, T, N, S), q.dtype)
    out = {"dq": per_key, "dk": per_key} | ({"dw": per_key} if delta else {})
    out |= {"dg": array((parts, B, T, N), jnp.float32)}
    pointers = {"q": q, "k": k, "v": v, "g": g, "h": h, "do": d_o, "dh": dh} | delta
    grid, how = (parts * (T // CHUNK), B * N), sizes(k, v) | {"B": B, "scale": 1.0}
    dq, dk, *dw, dg = launch(chunk_bwd_kernel_dqkwg, grid, GRADIENTS, out, **pointers, **how)
    return per_group(dq, q), per_group(dk, k), dg.sum(0), dw[0] if dw else None


def _d_values(q: Array, k: Array, g: Array, d_o: Array, dh: Array) -> Array:
    """Returns the gradient of the values."""
    with quiet():
        from fla.ops.common.chunk_o import chunk_bwd_kernel_dv

    (B, T, N, V), how = d_o.shape, sizes(k, d_o)
    grid = (-(-V // GRADIENTS.BV) * (T // CHUNK), B * N)
    pointers = {"q": q, "k": k, "g": g, "do": d_o, "dh": dh}
    out = {"dv": array(d_o.shape, d_o.dtype)}
    return launch(chunk_bwd_kernel_dv, grid, GRADIENTS, out, **pointers, scale=1.0, **how)[0]


simple_gla.defvjp(_kept, _backward)
