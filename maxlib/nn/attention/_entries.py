"""Choice of compressed keys by an indexer, attention to those that are chosen, and the cache of a layer with them.

Shapes: B rows, T tokens, C entries, K chosen entries, N heads of width H, R latent size.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.attention._compressor import Compressor, EntryCache, rotate_last
from maxlib.nn.attention._index_loss import HIDDEN
from maxlib.nn.attention._indexer import Chosen, Indexer, fix, taken
from maxlib.nn.attention._query_chunks import over_queries
from maxlib.nn.cache import KVCache, LayerCache, RingCache
from maxlib.nn.decoder._context import Context
from maxlib.ops import Rope, StaticMask

GATHER_FROM = 4  # times as many entries as are chosen


@pytree
class CompressedKVCache(LayerCache):
    """Cache of `CompressedAttention`; it cannot be rewound.

    Attributes:
        window: The last keys. Its values have width 0, because keys are the values.
        entries: Compressed keys; None without a compressor.
        index: Compressed keys of the indexer; None without one.
    """

    kind: ClassVar[str | None] = "ring and compressed"

    window: KVCache | RingCache
    entries: EntryCache | None = None
    index: EntryCache | None = None

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens that a row can hold; None without a limit."""
        limits = [cache.capacity for cache in (self.window, self.entries) if cache is not None]
        return min((slots for slots in limits if slots is not None), default=None)


class EntryIndexer(Indexer):
    """Indexer of compressed keys, which it makes by a compressor of its own. Its weights are stored and not trained.

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        num_heads: Number of index heads.
        head_dim: Width of index queries and keys.
        top_k: Entries that a query attends to.
        rate: Tokens of an entry.
        rope: Rotation of the last `rope.dim` numbers of index queries and keys.
        norm_eps: Epsilon of the compressor's norm.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        dim: int,
        q_rank: int,
        *,
        num_heads: int,
        head_dim: int,
        top_k: int,
        rate: int,
        rope: Rope,
        norm_eps: float,
        rngs: nnx.Rngs,
    ):
        D, R, I, H = dim, q_rank, num_heads, head_dim
        self.q = Einsum("...R,NHR->...NH", (I, H, R), ("heads", "head_dim", "rank"), gather_once=True, rngs=rngs)
        self.weight = Einsum("...D,ND->...N", (I, D), ("heads", "embed"), rngs=rngs)
        self.compressor = Compressor(D, H, rate=rate, overlap=True, rope=rope, norm_eps=norm_eps, rngs=rngs)
        self.dim, self.num_heads, self.top_k, self.rope = H, I, top_k, rope
        fix(self)

    def _rotate(self, x: Array, ctx: Context) -> Array:
        return rotate_last(x, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)


def attend_entries(
    q: Float[Array, "B T N H"],
    entries: Float[Array, "B C H"],
    chosen: Chosen,
    *,
    scale: float,
    mask_hint: StaticMask | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attends to entries, which are keys and values of all heads.

    Chosen ones are gathered where they are few among many: products then fall with their share, while one query after
    the other reads its own.

    Args:
        q: Queries.
        entries: All entries.
        chosen: Those that each query attends to.
        scale: Factor on scores.
        mask_hint: Static description of the bounds.
        implementation: As in `ops.attention`.

    Returns:
        The output, and the log-sum-exp of the scores.
    """
    if chosen.best is not None and entries.shape[1] >= GATHER_FROM * chosen.best.shape[2]:
        return _gathered(q, entries, chosen, scale)
    bias = None
    if chosen.best is not None:
        # [B, T, C] -> [B, 1, T, C]: the same for all heads.
        bias = jnp.where(chosen.among_all(entries.shape[1]), 0.0, HIDDEN)[:, None]
    return ops.attention(
        q,
        entries[:, :, None],
        q.shape[-1],
        k_start=chosen.start,
        k_end=chosen.end,
        bias=bias,
        scale=scale,
        mask_hint=mask_hint,
        implementation=implementation,
        return_lse=True,
    )


def _gathered(q: Array, entries: Array, chosen: Chosen, scale: float) -> tuple[Array, Array]:
    """Attends to gathered entries, chunk by chunk of queries; the backward pass gathers again."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # The gradients of an entry from several chunks are added up in float32.
    wide = entries.astype(dtype) if q.shape[1] > 1 else entries

    def step(carry, chunk):
        q, chosen = chunk
        keys = taken(wide, chosen.best, q.dtype)
        scores = scale * jnp.einsum("btnh,btkh->btnk", q, keys, preferred_element_type=dtype)
        seen = chosen.among_best()[:, :, None]
        scores = jnp.where(seen, scores, HIDDEN)
        some = seen.any(axis=-1)
        lse = jax.nn.logsumexp(scores, axis=-1)
        probs = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0).astype(q.dtype)
        out = jnp.einsum("btnk,btkh->btnh", probs, keys)
        return carry, (out, jnp.where(some, lse, -jnp.inf))

    assert chosen.best is not None
    width = (q.shape[2] + q.shape[3]) * chosen.best.shape[2]
    return over_queries(jax.checkpoint(step), None, (q, chosen), per_query=width)[1]
