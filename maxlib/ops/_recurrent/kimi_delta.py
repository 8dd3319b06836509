"""Kernels of Kimi delta attention (Kimi Team 2025, arXiv:2510.26692): in matmuls, chunk by chunk, and token by token.

Every channel d of a key has its own decay, so the decay between two tokens stands inside their product. Within a chunk
of C tokens, G is the running sum of log decays, and `P(a)[i, j] = sum_d a[i, d] k[j, d] exp(G[i, d] - G[j, d])` for j
<= i in the same document, else 0. All updates of a chunk follow from one unit triangular system, as in the gated delta
rule:

    (I + strict_lower(beta P(k))) T = I,  U = T (beta v),  W = T (beta exp(G) k)
    V = U - W S,  o = (exp(G) q) S + P(q) V,  S <- exp(G[C]) S + (exp(G[C] - G) k)^T V

P is no product of `exp(G) a` and `exp(-G) k`: the second overflows. Of two halves of a chunk, the later rows and the
earlier columns meet at the border between them, `exp(G[i] - border) exp(border - G[j])`, and both factors are at most
1; what is left are the two triangles of half the size, down to single tokens. Blocks and memory are those of the gated
delta rule.

Shapes: B rows, n chunks of a block, C tokens of a chunk, N heads, Hk and Hv wide.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib.ops._recurrent import jax_linear_attention
from maxlib.ops._recurrent.chunks import ChunkTiles, in_blocks, in_chunks, joined, over_blocks, unit_lower_inverse
from maxlib.ops._recurrent.recurrence import (
    DeltaInputs,
    RecurrentCall,
    Settings,
    normalized,
    recurrent_op,
    token_by_token,
)

_HEADS = (1, 1, 1, 1, 1, 0)  # axes of heads in each of `DeltaInputs`


@dataclasses.dataclass(frozen=True)
class KimiTiles(ChunkTiles):
    """Tokens of a chunk, a power of two as it is halved down to single tokens, and of a block of `chunked`."""

    kernel: ClassVar[str] = "kimi_delta_attention/chunked"

    def __post_init__(self):
        super().__post_init__()
        self.require_powers_of_two("chunk")


def kimi_tiles(call: RecurrentCall) -> KimiTiles:
    """Chooses tile sizes: on TPUs one chunk a block, else the default."""
    return KimiTiles(64, 64) if call.platform == "tpu" else KimiTiles()


def chunked(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
        x: Inputs of each token; queries and keys not yet scaled or normalized.
        state: State before the first token, `B N Hk Hv`.
        settings: How it runs; its tiles are `KimiTiles`.

    Returns:
        The outputs, `B T N Hv`, and the state after the last token.
    """
    tokens, tiles = x.q.shape[1], cast(KimiTiles, settings.tiles)
    size = min(tiles.chunk, 1 << (tokens - 1).bit_length())  # a power of two
    blocks, per_block = tiles.count(tokens, size)
    xs: DeltaInputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)

    def block(state, x):
        cut = DeltaInputs(*(in_chunks(a, heads, size) for a, heads in zip(x, _HEADS, strict=True)))
        dot = functools.partial(jnp.einsum, precision=settings.precision)
        return _block(state, normalized(cut, settings), dot)

    return over_blocks(block, xs, state, tokens)


def _block(state: Array, x: DeltaInputs, dot: Callable) -> tuple[Array, Array]:
    """Computes the state after one block and its outputs, `B t N Hv`."""
    chunks, scores = _chunks(x, dot)

    def step(state, chunk):
        readers, u, writers, decay = chunk
        # [2C, Hk] [Hk, Hv]: W S, and what queries read of the state.
        taken, out = jnp.split(dot("bnid,bndv->bniv", readers, state), 2, axis=-2)
        values = u - taken
        return decay[..., None] * state + dot("bnid,bniv->bndv", writers, values), (values, out)

    state, (values, out) = jax.lax.scan(step, state, chunks)
    # Outputs of all chunks: what the state before gave, and what the chunk itself adds.
    return state, joined(out + dot("cbnij,cbnjv->cbniv", scores, values), 1)


def _chunks(x: DeltaInputs, dot) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Computes what all chunks of a block do to a state, and the scores P(q), `n B N C C`.

    Returns:
        W above exp(G) q, `n B N 2C Hk`, which read the state before a chunk; U, `n B N C Hv`; exp(G[C] - G) k, `n B N C
        Hk`, which write; and exp(G[C]), `n B N Hk`. Then the scores.
    """
    # q, k and rates are `n B N C Hk`, v is `n B N C Hv`, beta is `n B N C`, is_start is `n B C`.
    document = jnp.cumsum(x.is_start, axis=-1)[:, :, None]  # n B 1 C: 0 for the one that began before
    first, last = document == 0, document == document[..., -1:]
    same = document[..., :, None] == document[..., None, :]
    # The chunks of a head one after the other, so that each can be taken for two of half the size:
    # n B N C Hk -> B N n C Hk.
    by_head = [jnp.moveaxis(a, 0, 2) for a in (x.q, x.k, x.log_decay)]
    products = _products(by_head[0], by_head[1], by_head[2], dot)
    of_q, of_k, up_to, behind = (jnp.moveaxis(y, 2, 0) for y in products)
    of_q, of_k = jnp.where(same, of_q, 0), jnp.where(same, of_k, 0)
    into = jnp.where(first[..., None], jnp.exp(up_to), 0)
    out_of = jnp.where(last[..., None], jnp.exp(behind), 0)
    beta = x.beta[..., None]
    inverse = unit_lower_inverse(beta * jnp.tril(of_k, -1))
    solve = functools.partial(dot, "cbnij,cbnjd->cbnid", inverse)
    readers = jnp.concatenate([solve(beta * into * x.k), into * x.q], axis=-2)
    return (readers, solve(beta * x.v), out_of * x.k, into[..., -1, :]), of_q


def _products(q: Array, k: Array, log_decay: Array, dot) -> tuple[Array, Array, Array, Array]:
    """Computes P(q) and P(k) of `B N n C Hk`, and sums of log decays.

    Returns:
        P(q) and P(k), `B N n C C`; the sums from the first token to each, itself included, and those of the tokens
        behind each, `B N n C Hk`. None is a difference of large sums, which would round.
    """
    B, N, n, size, width = q.shape
    if size == 1:
        of_q, of_k = (jnp.sum(a * k, axis=-1, keepdims=True) for a in (q, k))
        return of_q, of_k, log_decay, jnp.zeros_like(log_decay)
    # Both triangles at once, as chunks of half the size. An axis for the halves at each level would make eight axes,
    # and XLA for CPUs (jax 0.10.2) crashes in x y^T of eight axes.
    halves = [a.reshape(B, N, 2 * n, size // 2, width) for a in (q, k, log_decay)]
    *triangles, up_to, behind = _products(halves[0], halves[1], halves[2], dot)
    (up_to1, up_to2), (behind1, behind2) = _pairs(up_to), _pairs(behind)
    columns = k[..., : size // 2, :] * jnp.exp(behind1)

    def joined_triangle(a, triangles):
        above, below = _pairs(triangles)
        corner = dot("...id,...jd->...ij", a[..., size // 2 :, :] * jnp.exp(up_to2), columns)
        return jnp.block([[above, jnp.zeros_like(corner)], [corner, below]])

    up_to = jnp.concatenate([up_to1, up_to1[..., -1:, :] + up_to2], axis=-2)
    behind = jnp.concatenate([behind1 + up_to2[..., -1:, :], behind2], axis=-2)
    return joined_triangle(q, triangles[0]), joined_triangle(k, triangles[1]), up_to, behind


def _pairs(a: Array) -> tuple[Array, Array]:
    """Returns the first and the second half of each chunk, of chunks of half the size, `B N 2n ...`."""
    return a[:, :, ::2], a[:, :, 1::2]


# ---------------------------------------------------------------------------------------------- token by token


def sequential(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other; arguments and results are those of `chunked`."""
    return token_by_token(_step, normalized(x, settings), state)


def _step(state: Array, x: DeltaInputs) -> tuple[Array, Array]:
    """Updates the state with one token, and reads it."""
    # S <- diag(exp(g)) S, or 0 at the start of a document. [B, N, Hk] -> [B, N, Hk, 1]
    decay = jnp.where(x.is_start[:, None, None], 0.0, jnp.exp(x.log_decay))
    state = decay[..., None] * state
    # S <- S + k (beta (v - k^T S))^T: move the value stored under k towards v by beta.
    stored = jnp.einsum("bnd,bndv->bnv", x.k, state, precision="highest")
    delta = x.beta[..., None] * (x.v - stored)
    state = state + x.k[..., None] * delta[..., None, :]
    # o = q^T S
    return state, jnp.einsum("bnd,bndv->bnv", x.q, state, precision="highest")


KIMI_DELTA = recurrent_op(
    "kimi_delta_attention",
    jax_linear_attention=jax_linear_attention.kimi_delta,
    refuses=jax_linear_attention.refuses_kimi_delta,
    chunked=chunked,
    tiles=kimi_tiles,
    sequential=sequential,
)
