"""Kimi delta attention in matmuls, chunk by chunk (Kimi Team 2025, arXiv:2510.26692).

Every channel d of a key has its own decay, so the decay between two tokens stands inside their product. Within a chunk
of C tokens, G is the running sum of log decays, and `P(a)[i, j] = sum_d a[i, d] k[j, d] exp(G[i, d] - G[j, d])` for j
<= i in the same document, else 0. All updates of a chunk follow from one unit triangular system, as in the gated delta
rule:

    (I + strict_lower(beta P(k))) T = I,  U = T (beta v),  W = T (beta exp(G) k)
    V = U - W S,  o = (exp(G) q) S + P(q) V,  S <- exp(G[C]) S + (exp(G[C] - G) k)^T V

P is no product of `exp(G) a` and `exp(-G) k`: the second overflows. Of two halves of a chunk, the later rows and the
earlier columns meet at the border between them, `exp(G[i] - border) exp(border - G[j])`, and both factors are at most
1; what is left are the two triangles of half the size. Blocks and memory are those of the gated delta rule.

Shapes: B rows, n chunks of a block, C tokens of a chunk, N heads, Hk and Hv wide.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._chunks import split
from maxlib.ops._gated_delta.chunked import unit_lower_inverse
from maxlib.ops._kda.inputs import Inputs
from maxlib.ops._varying import vary_alike

CHUNK = 64
BLOCK = 1024  # tokens of a block
SMALL = 4  # tokens of the triangles whose decays are computed for each pair
_HEADS = (1, 1, 1, 1, 1, 0)  # axes of heads in each of `Inputs`


def chunked(x: Inputs, state: Array, *, precision: jax.lax.Precision) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
      x: what each token brings, float32 or float64.
      state: state before the first token, `B N Hk Hv`.
      precision: precision of the matmuls; the triangular system is solved in the highest one.

    Returns:
      The outputs, `B T N Hv`, and the state after the last token.
    """
    tokens = x.q.shape[1]
    size = min(CHUNK, max(SMALL, 1 << (tokens - 1).bit_length()))  # a power of two
    count = -(-tokens // size)
    per_block = min(count, max(1, BLOCK // size))
    blocks = -(-count // per_block)
    xs = Inputs(*(split(a, heads, blocks, per_block, size) for a, heads in zip(x, _HEADS, strict=True)))
    xs, state = vary_alike((xs, state))
    block = jax.checkpoint(functools.partial(_block, precision=precision), prevent_cse=False)
    state, out = jax.lax.scan(block, state, xs)
    # [blocks, n, B, N, C, Hv] -> [B, blocks, n, C, N, Hv] -> [B, T, N, Hv]
    out = jnp.moveaxis(out, (2, 4), (0, 3))
    return out.reshape(out.shape[0], -1, *out.shape[4:])[:, :tokens], state


def _block(state: Array, x: Inputs, *, precision: jax.lax.Precision) -> tuple[Array, Array]:
    """Computes the state after one block and its outputs, `n B N C Hv`."""
    dot = functools.partial(jnp.einsum, precision=precision)
    chunks, scores = _chunks(x, dot)

    def step(state, chunk):
        readers, u, writers, kept = chunk
        # [2C, Hk] [Hk, Hv]: W S, and what queries read of the state.
        taken, out = jnp.split(dot("bnid,bndv->bniv", readers, state), 2, axis=-2)
        values = u - taken
        return kept[..., None] * state + dot("bnid,bniv->bndv", writers, values), (values, out)

    state, (values, out) = jax.lax.scan(step, state, chunks)
    # Outputs of all chunks: what the state before gave, and what the chunk itself adds.
    return state, out + dot("cbnij,cbnjv->cbniv", scores, values)


def _chunks(x: Inputs, dot) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Computes what all chunks of a block do to a state, and the scores P(q), `n B N C C`.

    Returns:
      W above exp(G) q, `n B N 2C Hk`, which read the state before a chunk; U, `n B N C Hv`; exp(G[C] - G) k, `n B N C
      Hk`, which write; and exp(G[C]), `n B N Hk`. Then the scores.
    """
    # q, k and rates are `n B N C Hk`, v is `n B N C Hv`, beta is `n B N C`, is_start is `n B C`.
    document = jnp.cumsum(x.is_start, axis=-1)[:, :, None]  # n B 1 C: 0 for the one that began before
    first, last = document == 0, document == document[..., -1:]
    same = document[..., :, None] == document[..., None, :]
    into = jnp.where(first[..., None], jnp.exp(_up_to(x.log_decay)), 0)
    out_of = jnp.where(last[..., None], jnp.exp(_behind(x.log_decay)), 0)
    # One by one: of both at once, with an axis of one on k, XLA for CPUs makes a gradient that crashes (jax 0.10.2).
    of_q, of_k = (jnp.where(same, _products(a, x.k, x.log_decay, dot), 0) for a in (x.q, x.k))
    beta = x.beta[..., None]
    inverse = unit_lower_inverse(beta * jnp.tril(of_k, -1))
    solve = functools.partial(dot, "cbnij,cbnjd->cbnid", inverse)
    readers = jnp.concatenate([solve(beta * into * x.k), into * x.q], axis=-2)
    return (readers, solve(beta * x.v), out_of * x.k, into[..., -1, :]), of_q


def _products(a: Array, k: Array, log_decay: Array, dot) -> Array:
    """Returns P(a), `... C C`, of `... C Hk`."""
    size = a.shape[-2]
    if size <= SMALL:
        total = jnp.cumsum(log_decay, axis=-2)
        # Masked before the exponential: above the diagonal differences are positive and would overflow.
        earlier = jnp.tril(jnp.ones((size, size), bool))[..., None]
        between = jnp.exp(jnp.where(earlier, total[..., :, None, :] - total[..., None, :, :], -jnp.inf))
        return jnp.sum(a[..., :, None, :] * k[..., None, :, :] * between, axis=-1)
    (a1, a2), (k1, k2), (g1, g2) = (jnp.split(y, 2, axis=-2) for y in (a, k, log_decay))
    corner = dot("...id,...jd->...ij", a2 * jnp.exp(_up_to(g2)), k1 * jnp.exp(_behind(g1)))
    # Both triangles at once.
    above, below = _products(jnp.stack([a1, a2]), jnp.stack([k1, k2]), jnp.stack([g1, g2]), dot)
    return jnp.block([[above, jnp.zeros_like(corner)], [corner, below]])


def _up_to(log_decay: Array) -> Array:
    """Sums log decays from the first token to each, itself included."""
    return jnp.cumsum(log_decay, axis=-2)


def _behind(log_decay: Array) -> Array:
    """Sums log decays of the tokens behind each; no difference of large sums, which would round."""
    behind = jnp.concatenate([log_decay[..., 1:, :], jnp.zeros_like(log_decay[..., :1, :])], axis=-2)
    return jax.lax.cumsum(behind, axis=behind.ndim - 2, reverse=True)
