"""The gated delta rule by the package's kernels.

Within a chunk the values that tokens write are `u - w S`, of the state S before the chunk, with `[w, u] = A [beta
exp(G) k, beta v]` and `A = (I + strict_lower(beta k k^T exp(G_i - G_j)))^-1` (Yang et al. 2024, arXiv:2412.06464).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxlib.hardware import current_device, is_ampere_or_ada
from maxlib.ops._fla.launch import Tile, array, launch, over_rows, quiet
from maxlib.ops._fla.ssd import d_tokens, outputs
from maxlib.ops._fla.tokens import CHUNK, LN2, chunks_and_heads, in_chunks, joined, lower, per_group, sizes, summed
from maxlib.ops._jax_linear_attention import Run

INVERSE = Tile(warps=4, stages=3)
WRITTEN = Tile(warps=4, stages=2)
STATES = Tile(warps=2, stages=2, BV=32)  # four warps gave races on Blackwell with Triton before 3.8
D_STATES = Tile(warps=4, stages=2, BV=32)
D_STATES_WIDE = Tile(warps=4, stages=1, BV=32)  # keys over 128 in two stages need 113 KiB of shared memory; Ada has 99
SCORES = Tile(warps=4, stages=2)
D_INVERSE = Tile(warps=4, stages=2)
D_INVERSE_BLACKWELL = Tile(warps=2, stages=4)  # the only one that the package's authors tried and trust there


def gated_delta(x: Any, state: Array, run: Run) -> tuple[Array, Array]:
    """Applies the gated delta rule.

    Args:
      x: inputs of the gated delta rule, normed and scaled: q and k `B T K Hk`, v `B T K G Hv`, rates `B T K G`.
      state: state before the first token, `B K G Hk Hv`.
      run: how the call is run.

    Returns:
      The outputs, `B T K G Hv`, and the state after the last token.
    """
    q, k, v = (in_chunks(a.astype(run.dtype)) for a in (x.q, x.k, joined(x.v)))
    g = summed(joined(x.log_decay), x.is_start if run.documents else None)
    first = None if run.fresh else joined(state, 1).astype(jnp.float32)
    out, last = delta_rule(q, k, v, g, in_chunks(joined(x.beta).astype(jnp.float32)), first)
    return out[:, : x.v.shape[1]].reshape(x.v.shape), last.reshape(state.shape)


@jax.custom_vjp
def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None) -> tuple[Array, Array]:
    """Applies the gated delta rule.

    Args:
      q: queries, `B T K Hk`, T a multiple of 64.
      k: keys, `B T K Hk`; each is shared by N / K consecutive value heads.
      v: values, `B T N Hv`.
      g: logarithms of decays to the base 2, summed within chunks, `B T N`, float32.
      beta: steps, `B T N`, float32.
      state: state before the first token, `B N Hk Hv`, float32; None for zero.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token, float32.
    """
    return _kept(q, k, v, g, beta, state)[0]


def _kept(q, k, v, g, beta, state):
    out, last, inverse = _forward(q, k, v, g, beta, state)
    return (out, last), (q, k, v, g, beta, state, inverse)


@over_rows
def _forward(q, k, v, g, beta, state):
    inverse = _inverse(k, v, g, beta)
    w, u = _written(k, v, g, beta, inverse)
    h, written, last = states(k, w, u, state, k.dtype, g=g)
    return outputs(q, k, written, h, g), last, inverse


def _inverse(k: Array, v: Array, g: Array, beta: Array) -> Array:
    """Inverts the triangular system of each chunk, `B T N 64`."""
    with quiet():
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel as kernel

    # In blocks of 16 tokens: row by row within a block, then by matmuls between the blocks of a chunk.
    how = sizes(k, v) | {"BC": 16}
    out = {"A": array((*beta.shape, CHUNK), k.dtype)}
    return lower(launch(kernel, chunks_and_heads(v), INVERSE, out, k=k, g=g, beta=beta, **how)[0])


def _written(k: Array, v: Array, g: Array, beta: Array, inverse: Array) -> tuple[Array, Array]:
    """Returns w, `B T N Hk`, and u, `B T N Hv`."""
    with quiet():
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel as kernel

    out = {"w": array((*beta.shape, k.shape[-1]), k.dtype), "u": array(v.shape, v.dtype)}
    pointers = {"k": k, "v": v, "beta": beta, "A": inverse, "g": g}
    return launch(kernel, chunks_and_heads(v), WRITTEN, out, **pointers, **sizes(k, v))


def states(
    k: Array, w: Array, u: Array, state: Array | None, dtype: Any, **decays: Array
) -> tuple[Array, Array, Array]:
    """Runs the recurrence over chunks.

    Args:
      k: keys, `B T K Hk`.
      w: what of the state before a chunk each token subtracts from its value, `B T N Hk`.
      u: values without that, `B T N Hv`.
      state: state before the first token, `B N Hk Hv`; None for zero.
      dtype: dtype of the states.
      decays: `g`, a decay for each head, or `gk`, for each channel of its keys.

    Returns:
      The state before each chunk, `B C N Hk Hv`, what each token writes, `B T N Hv`, and the last state, in float32.
    """
    with quiet():
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64 as kernel

    (B, T, N, V), S = u.shape, k.shape[-1]
    out = {"v_new": array(u.shape, u.dtype), "h": array((B, T // CHUNK, N, S, V), dtype)}
    out |= {"ht": array((B, N, S, V), jnp.float32)}
    pointers = {"k": k, "v": u, "w": w, "h0": state} | decays
    how = sizes(k, u)
    written, h, last = launch(kernel, (-(-V // STATES.BV) * B * N,), STATES, out, **pointers, **how)
    return h, written, last


def d_states(
    q: Array, k: Array, w: Array, d_o: Array, d_local: Array, state: Array | None, d_last: Array, **decays: Array
) -> tuple[Array, Array, Array | None]:
    """Runs the recurrence backwards over chunks.

    Args:
      q: queries, `B T K Hk`.
      k: keys, `B T K Hk`.
      w: as in `states`.
      d_o: gradient of the outputs, `B T N Hv`.
      d_local: gradient of what tokens write, from outputs of the same chunk, `B T N Hv`.
      state: state before the first token, or None.
      d_last: gradient of the last state, `B N Hk Hv`.
      decays: as in `states`.

    Returns:
      The gradients of the state after each chunk, `B C N Hk Hv`, of what tokens write, and of the first state.
    """
    with quiet():
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64 as kernel

    (B, T, N, V), S = d_o.shape, k.shape[-1]
    out = {} if state is None else {"dh0": array(state.shape, jnp.float32)}
    out |= {"dh": array((B, T // CHUNK, N, S, V), jnp.float32), "dv2": array(d_o.shape, d_o.dtype)}
    pointers = {"q": q, "k": k, "w": w, "dht": d_last, "do": d_o, "dv": d_local} | decays
    how, tile = sizes(k, d_o) | {"scale": 1.0}, D_STATES if S <= 128 else D_STATES_WIDE
    *first, dh, d_written = launch(kernel, (-(-V // tile.BV) * B * N,), tile, out, **pointers, **how)
    return dh, d_written, first[0] if first else None


def _backward(kept, d_out):
    return _gradients(*kept, *d_out)


@over_rows
def _gradients(q, k, v, g, beta, state, inverse, d_o, d_last):
    d_o, d_last = d_o.astype(v.dtype), d_last.astype(jnp.float32)
    w, u = _written(k, v, g, beta, inverse)
    # In float32, as in the package for SSD: the kernels sum the products of states and gradients in these' dtype.
    h, written, _ = states(k, w, u, state, jnp.float32, g=g)
    # Backwards in the order of the forward pass: outputs, states, then w and u with the inverse behind them.
    d_local = _d_local(q, k, g, d_o)
    dh, d_written, d_state = d_states(q, k, w, d_o, d_local, state, d_last, g=g)
    dq, dk, dg, dw = d_tokens(q, k, written, g, h, d_o, dh, dv=d_written)
    dk_too, dv, d_beta, dg_too = _d_inverse(k, v, g, beta, inverse, dw, d_written)
    # Keys are in the scores and in the states, and in w and the inverse.
    dk += per_group(dk_too, k)
    return dq, dk, dv, LN2 * (dg + dg_too), d_beta, d_state


def _d_local(q: Array, k: Array, g: Array, d_o: Array) -> Array:
    """Returns the gradient of what tokens write from outputs of the same chunk, `B T N Hv`."""
    with quiet():
        from fla.ops.common.chunk_o import chunk_bwd_kernel_dv_local as kernel

    how = sizes(k, d_o) | {"scale": 1.0}
    out = {"dv": array(d_o.shape, d_o.dtype)}
    return launch(kernel, chunks_and_heads(d_o), SCORES, out, q=q, k=k, g=g, do=d_o, **how)[0]


def _d_inverse(k, v, g, beta, inverse, dw, du) -> tuple[Array, Array, Array, Array]:
    """Returns gradients by way of w and u: of keys for each value head, values, steps and sums of decays."""
    with quiet():
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd_kernel as kernel

    out = {"dk": array((*beta.shape, k.shape[-1]), k.dtype), "dv": array(v.shape, v.dtype)}
    out |= {"db": array(beta.shape, jnp.float32), "dg": array(g.shape, jnp.float32)}
    pointers = {"k": k, "v": v, "beta": beta, "g": g, "A": inverse, "dw": dw, "du": du}
    tile = D_INVERSE if is_ampere_or_ada(current_device()[1]) else D_INVERSE_BLACKWELL
    return launch(kernel, chunks_and_heads(v), tile, out, **pointers, **sizes(k, v))


delta_rule.defvjp(_kept, _backward)
