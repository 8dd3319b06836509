"""Kimi delta attention by the package's kernels, for gates without a lower bound.

As the gated delta rule, with a decay for each channel of a key (Kimi Team 2025, arXiv:2510.26692): the decay between
two tokens of a chunk is inside the products of their keys, `sum_c q_ic k_jc exp(G_ic - G_jc)`. Blocks of 16 tokens
meet at a border between them, where both exponents are at most 0; within a block the factor of each pair is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from maxlib.hardware import current_device, is_ampere_or_ada
from maxlib.ops._fla.gated_delta import d_states, states
from maxlib.ops._fla.launch import Tile, array, launch, over_rows, quiet
from maxlib.ops._fla.tokens import CHUNK, LN2, chunks_and_heads, in_chunk, in_chunks, lower, sizes, summed
from maxlib.ops._jax_linear_attention import Run

BLOCK = 16  # tokens whose pairs are computed one by one
PAIRS = Tile(warps=4, stages=3)
INVERSE = Tile(warps=2, stages=3, BK=32)
WRITTEN = Tile(warps=4, stages=2)
OUTPUTS = Tile(warps=4, stages=2)
D_SCORES = Tile(warps=4, stages=2)
D_WRITTEN = Tile(warps=8, stages=2, BK=32)
D_WRITTEN_BLACKWELL = Tile(warps=8, stages=2)  # the package excludes tiles of 32 channels there
D_PAIRS = Tile(warps=4, stages=2, BK=32)


def kimi(x: Any, state: Array, run: Run) -> tuple[Array, Array]:
    """Applies Kimi delta attention.

    Args:
      x: inputs of Kimi delta attention, normed and scaled: q, k and rates `B T N Hk`, v `B T N Hv`, beta `B T N`.
      state: state before the first token, `B N Hk Hv`.
      run: how the call is run.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token.
    """
    q, k, v = (in_chunks(a.astype(run.dtype)) for a in (x.q, x.k, x.v))
    g = summed(x.log_decay, x.is_start if run.documents else None)
    first = None if run.fresh else state.astype(jnp.float32)
    out, last = kimi_delta(q, k, v, g, in_chunks(x.beta.astype(jnp.float32)), first)
    return out[:, : x.v.shape[1]], last


@jax.custom_vjp
def kimi_delta(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None) -> tuple[Array, Array]:
    """Applies Kimi delta attention.

    Args:
      q: queries, `B T N Hk`, T a multiple of 64.
      k: keys, `B T N Hk`.
      v: values, `B T N Hv`.
      g: logarithms of decays to the base 2, summed within chunks, `B T N Hk`, float32.
      beta: steps, `B T N`, float32.
      state: state before the first token, `B N Hk Hv`, float32; None for zero.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token, float32.
    """
    return _kept(q, k, v, g, beta, state)[0]


def _kept(q, k, v, g, beta, state):
    out, last, scores, inverse = _forward(q, k, v, g, beta, state)
    return (out, last), (q, k, v, g, beta, state, scores, inverse)


@over_rows
def _forward(q, k, v, g, beta, state):
    scores, inverse = _scores(q, k, v, g, beta)
    w, u, _, late = _written(q, k, v, g, beta, inverse)
    h, written, last = states(late, w, u, state, k.dtype, gk=g)
    return _outputs(q, written, g, scores, h), last, scores, inverse


def _scores(q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """Returns the products of queries and keys of each chunk, and the inverse of its triangular system, `B T N 64`."""
    with quiet():
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_kernel_inter_solve_fused as across
        from fla.ops.kda.chunk_intra_token_parallel import chunk_kda_fwd_kernel_intra_token_parallel as within

    # Both kernels compute products of keys too, from which the second makes the inverse: the first those within blocks
    # of 16 tokens, one block of threads for each token and up to four heads.
    B, T, N, S = k.shape
    pointers, how = {"q": q, "k": k, "g": g, "beta": beta}, sizes(k, v) | {"BC": BLOCK, "scale": 1.0}
    whole, block = array((B, T, N, CHUNK), k.dtype), array((B, T, N, BLOCK), jnp.float32)
    out, heads = {"Aqk": whole, "Akk": block}, min(N, 4) if N in (1, 2) or N % 4 == 0 else 1
    pairs = how | {"N": B, "BK": 1 << (S - 1).bit_length(), "BH": heads}
    near, diagonal = launch(within, (B * T, N // heads), PAIRS, out, **pointers, **pairs)
    out, solved = {"Aqk": whole, "Akk": whole}, how | {"NC": CHUNK // BLOCK, "USE_SAFE_GATE": False}
    far, inverse = launch(across, chunks_and_heads(v), INVERSE, out, **pointers, Akkd=diagonal, **solved)
    # Each kernel writes its blocks of the scores: those on the diagonal, and those left of it.
    row, column = in_chunk(T)
    return lower(jnp.where(row // BLOCK == column // BLOCK, near, far)), lower(inverse)


def _written(q: Array, k: Array, v: Array, g: Array, beta: Array, inverse: Array) -> tuple[Array, ...]:
    """Returns w, u, and queries and keys with the decays since the chunk began, and until it ends."""
    with quiet():
        from fla.ops.kda.wy_fast import recompute_w_u_fwd_kda_kernel as kernel

    like = array(k.shape, k.dtype)
    out = {"qg": like, "kg": like, "w": like, "u": array(v.shape, v.dtype)}
    pointers = {"q": q, "k": k, "v": v, "beta": beta, "A": inverse, "gk": g}
    early, late, w, u = launch(kernel, chunks_and_heads(v), WRITTEN, out, **pointers, **sizes(k, v))
    return w, u, early, late


def _outputs(q: Array, written: Array, g: Array, scores: Array, h: Array) -> Array:
    """Reads states and the tokens of the same chunk, for each query."""
    with quiet():
        from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o as kernel

    chunks, heads = chunks_and_heads(written)
    grid = (-(-written.shape[-1] // OUTPUTS.BV) * chunks, heads)
    pointers, out = {"q": q, "v": written, "g": g, "h": h, "A": scores}, {"o": array(written.shape, written.dtype)}
    return launch(kernel, grid, OUTPUTS, out, **pointers, scale=1.0, **sizes(q, written))[0]


def _backward(kept, d_out):
    return _gradients(*kept, *d_out)


@over_rows
def _gradients(q, k, v, g, beta, state, scores, inverse, d_o, d_last):
    d_o, d_last = d_o.astype(v.dtype), d_last.astype(jnp.float32)
    w, u, early, late = _written(q, k, v, g, beta, inverse)
    h, written, _ = states(late, w, u, state, jnp.float32, gk=g)
    d_scores, d_local = _d_scores(q, k, written, scores, d_o)
    dh, d_written, d_state = d_states(early, late, w, d_o, d_local, state, d_last, gk=g)
    parts = {"q": q, "k": k, "g": g, "beta": beta}
    d_values = {"v": v, "v_new": written, "A": inverse, "h": h, "do": d_o, "dh": dh, "dv": d_written}
    # The next kernel adds to what this one returns, so both are float32.
    dq, dk, dv, dg, d_beta, d_inverse = _d_written(parts | d_values)
    dq, dk, dg, d_steps = _d_pairs(v, parts | {"dAqk": d_scores, "dAkk": d_inverse, "dq": dq, "dk": dk, "dg": dg})
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, LN2 * dg, d_beta + d_steps.sum(0), d_state


def _d_scores(q: Array, k: Array, written: Array, scores: Array, d_o: Array) -> tuple[Array, Array]:
    """Returns the gradients of the scores, and of what tokens write from outputs of the same chunk."""
    with quiet():
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_kernel_dAv as kernel

    out = {"dv": array(d_o.shape, d_o.dtype), "dA": array(scores.shape, jnp.float32)}
    pointers, how = {"q": q, "k": k, "v": written, "A": scores, "do": d_o}, sizes(k, d_o) | {"scale": 1.0}
    d_local, d_scores = launch(kernel, chunks_and_heads(d_o), D_SCORES, out, **pointers, **how)
    return d_scores, d_local


def _d_written(given: dict[str, Array]) -> tuple[Array, ...]:
    """Returns gradients by way of states, w and u: of q, k, v, sums of decays, steps and the inverse's system."""
    with quiet():
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_kernel_wy_dqkg_fused as kernel

    k, v, wide = given["k"], given["v"], jnp.float32
    out = {"dq": array(k.shape, wide), "dk": array(k.shape, wide), "dv2": array(v.shape, v.dtype)}
    out |= {"dg": array(k.shape, wide), "db": array(k.shape[:3], wide), "dA": array((*k.shape[:3], CHUNK), wide)}
    tile = D_WRITTEN if is_ampere_or_ada(current_device()[1]) else D_WRITTEN_BLACKWELL
    return launch(kernel, chunks_and_heads(v), tile, out, **given, **sizes(k, v), scale=1.0)


def _d_pairs(v: Array, given: dict[str, Array]) -> tuple[Array, ...]:
    """Adds the gradients by way of the products within chunks: of q, k, sums of decays, and steps in parts."""
    with quiet():
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_kernel_intra as kernel

    k, blocks = given["k"], CHUNK // BLOCK
    parts, (chunks, heads) = -(-k.shape[-1] // D_PAIRS.BK), chunks_and_heads(v)
    like = array(k.shape, jnp.float32)
    out = {"dq2": like, "dk2": like, "dg2": like, "db": array((parts, *k.shape[:3]), jnp.float32)}
    how = sizes(k, v) | {"B": k.shape[0], "BC": BLOCK, "NC": blocks}
    # A safe gate is one with a lower bound: a factor for each token in place of one for each pair.
    how |= {"SAFE_GATE": False, "GATE_SHIFT": 0.0, "USE_GATHER": False}
    return launch(kernel, (parts * blocks * chunks, heads), D_PAIRS, out, **given, **how)


kimi_delta.defvjp(_kept, _backward)
