"""Kernels of the gated delta rule (Yang et al. 2024, arXiv:2412.06464): in matmuls, chunk by chunk, and token by token.

Within a chunk of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for j <= i in the same
document, else 0. The values V that a chunk writes into the state S solve one unit triangular system:

- `T = (I + strict_lower(beta k k^T D))^-1`, and `V = T beta (v - exp(G) k S)`
- `o = exp(G) q S + (q k^T D) V`, and `S <- exp(G[C]) S + k^T (exp(G[C] - G) V)`

Only S depends on the previous chunk: a block computes the rest for all its chunks at once, then passes the state
through them.

Shapes: B rows, n chunks of a block, C tokens of a chunk, K key heads, G value heads of each, Hk and Hv wide.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._xla_workarounds import inner, stored
from maxlib.ops._recurrent import jax_linear_attention, mosaic_tpu
from maxlib.ops._recurrent.chunks import (
    SMALL,
    ChunkTiles,
    count_starts,
    decays,
    for_each_head,
    in_blocks,
    in_chunks,
    joined,
    over_blocks,
    unit_lower_inverse,
)
from maxlib.ops._recurrent.recurrence import (
    DeltaInputs,
    RecurrentCall,
    Settings,
    normalized,
    recurrent_op,
    token_by_token,
)

_HEADS = (1, 1, 2, 2, 2, 0)  # axes of heads in each of `DeltaInputs`
LARGE_VECTOR_MEMORY = ("TPU v5 lite", "TPU v6 lite")  # 128 MiB; other TPUs have half of it or less


@dataclasses.dataclass(frozen=True)
class DeltaTiles(ChunkTiles):
    """Tokens of a chunk, a power of two as its triangle is inverted by doubling, and of a block of `chunked`."""

    kernel: ClassVar[str] = "gated_delta_rule/chunked"

    def __post_init__(self):
        super().__post_init__()
        self.require(SMALL, "chunk")
        self.require_powers_of_two("chunk")


def delta_tiles(call: RecurrentCall) -> DeltaTiles:
    """Chooses tile sizes: one wide chunk a block where the intermediates of more do not fit into vector memory."""
    small = call.platform == "tpu" and call.device_kind not in LARGE_VECTOR_MEMORY
    return DeltaTiles(128, 128) if small else DeltaTiles()


def chunked(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
        x: Inputs of each token; queries and keys not yet scaled or normalized.
        state: State before the first token, `B K G Hk Hv`.
        settings: How it runs; its tiles are `DeltaTiles`.

    Returns:
        The outputs, `B T K G Hv`, in the dtype of the values, and the state after the last token.
    """
    tokens, tiles = x.q.shape[1], cast(DeltaTiles, settings.tiles)
    size = min(tiles.chunk, max(SMALL, 1 << (tokens - 1).bit_length()))  # a power of two
    blocks, per_block = tiles.count(tokens, size)
    xs: DeltaInputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)
    xs = xs._replace(is_start=count_starts(xs.is_start, size))
    dot = functools.partial(jnp.einsum, precision=settings.precision)

    def block(state, x):
        pairs = zip(x, _HEADS, strict=True)
        cut: Any = [None if a is None else in_chunks(a, heads, size) for a, heads in pairs]
        state, out = _block(state, normalized(DeltaInputs(*cut), settings), dot)
        return state, joined(out, 2).astype(x.v.dtype)

    return over_blocks(block, xs, state, tokens)


def _block(state: Array, x: DeltaInputs, dot: Callable) -> tuple[Array, Array]:
    """Computes the state after a block and its outputs, `n B K G C Hv`."""
    # q and k are `n B K C Hk`, v is `n B K G C Hv`, rates are `n B K G C`, and `is_start` counts starts, `n B C`.
    decay, into, out_of, across = decays(x.log_decay, x.is_start)
    rows = jnp.concatenate([x.k, x.q], axis=-2)
    of_k, of_q = jnp.split(for_each_head(dot("nbkid,nbkjd->nbkij", rows, x.k), x.v.shape[3]), 2, axis=-2)
    inverse = unit_lower_inverse(jnp.tril(x.beta[..., None] * of_k * decay, -1))

    def step(state, chunk):
        x, rows, into, out_of, across, inverse = chunk
        # [2C, Hk] [Hk, Hv]: what keys and queries read.
        by_keys, by_queries = jnp.split(dot("bkgid,bkgdv->bkgiv", rows, state), 2, axis=-2)
        missing = x.v - into[..., None] * by_keys
        values = dot("bkgij,bkgjv->bkgiv", inverse, x.beta[..., None] * missing)
        written = dot("bkgid,bkgiv->bkgdv", rows[..., : x.v.shape[-2], :], out_of[..., None] * values)
        return across[..., None, None] * state + written, (values, into[..., None] * by_queries)

    chunks = x, for_each_head(rows, x.v.shape[3]), into, out_of, across, inverse
    state, (values, out) = jax.lax.scan(step, state, chunks)
    return state, out + dot("nbkgij,nbkgjv->nbkgiv", of_q * decay, values)


# ---------------------------------------------------------------------------------------------- token by token


def sequential(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence to one token after the other; arguments and results are those of `chunked`."""
    return token_by_token(_step, normalized(x, settings), state)


def _step(state: Array, x: DeltaInputs) -> tuple[Array, Array]:
    """Reads the state with one token, and updates it."""
    # exp(g), or 0 at the start of a document. [B, K, G] -> [B, K, G, 1, 1]
    decay = jnp.exp(x.log_decay)
    decay = decay if x.is_start is None else jnp.where(x.is_start[:, None, None], 0.0, decay)
    decay = decay[..., None, None]
    # Key and query read the old state at once, exp(g) k^T S and exp(g) q^T S: a step passes over the state twice, once
    # to read and once to write. [B, K, G, 2, Hk] [B, K, G, Hk, Hv] -> [B, K, G, 2, Hv]
    both = stored(jnp.stack([x.k, x.q], axis=2))  # B K 2 Hk
    k, q = both[:, :, 0], both[:, :, 1]
    rows = for_each_head(both[None], state.shape[2])[0]
    read = decay * jnp.einsum("bkgrd,bkgdv->bkgrv", rows, state, precision="highest")
    by_key, by_query = read[..., 0, :], read[..., 1, :]
    # S <- exp(g) S + k (beta (v - exp(g) k^T S))^T: the value stored under k moves towards v by beta.
    delta = stored(x.beta[..., None] * (x.v - by_key))
    state = decay * state + k[:, :, None, :, None] * delta[..., None, :]
    # o = q^T S = exp(g) q^T S_old + (q^T k) delta
    return state, by_query + inner(q, k)[:, :, None, None] * delta


GATED_DELTA = recurrent_op(
    "gated_delta_rule",
    jax_linear_attention=jax_linear_attention.gated_delta,
    refuses=jax_linear_attention.refuses_gated_delta,
    chunked=chunked,
    tiles=delta_tiles,
    sequential=sequential,
    others=(mosaic_tpu.kernel(mosaic_tpu.gated_delta),),
)
