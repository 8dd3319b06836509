"""Indexers that choose pools of neighbouring keys: weighted means (GLM-5.3-Flash 2026), or plain ones of blocks
(Qwen3.8-Flash-Next 2026).

Shapes: B rows, T queries, S keys, K chosen pools, J places of pools, D width, I index heads of width Hi, R latent size
of queries.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn.attention._indexer import Chosen, Index, Indexer, fix, head_weights
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import LayerNorm, RMSNorm
from maxlib.ops import MRope, Rope

NOWHERE = 1 << 30  # a place beyond all keys


class PoolIndexer(Indexer):
    """Base class of indexers of pools of `pool` tokens; a subclass makes the keys of pools.

    Pools count from the first token of a document. A query attends to the `top_k` best of those that are complete, and
    to the tokens since the last one, its own included. A pool is known by its place: the place `j` is that of the only
    pool that may end at one of the keys from `j * pool` to `(j + 1) * pool - 1`.

    Attributes:
        pool: Tokens of a pool.
    """

    pool: int

    def choose(self, index: Index, bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]]) -> Chosen:
        """Returns the tokens of the chosen pools and those since the last pool, for each query's interval of keys."""
        start, end = bounds
        first = (start + self.pool - 1) // self.pool  # place of the document's first pool
        complete = (end - start) // self.pool
        pools = super().choose(index, (first, first + complete))
        assert pools.best is not None
        # The pool at the place j ends at the token j * pool + (start - 1) % pool.
        begin = self.pool * pools.best + ((start - 1) % self.pool - self.pool + 1)[..., None]
        begin = jnp.where(pools.among_best(), begin, NOWHERE)
        # [B, T, K] -> [B, T, K, pool] -> [B, T, K * pool]
        tokens = begin[..., None] + jnp.arange(self.pool)[None, None, None]
        tail = (start + self.pool * complete)[..., None] + jnp.arange(self.pool - 1)[None, None]
        return Chosen(start, end, jnp.concatenate([tokens.reshape(*start.shape, -1), tail], axis=-1))

    def _pools(self, a: Array, ctx: Context | None) -> Array:
        """Returns the tokens of pools, `B S W` as `B J pool W`.

        Args:
            a: What is stored of each token.
            ctx: Context of the tokens; None if each row is one document from its first key on.
        """
        B, S = a.shape[:2]
        a = jnp.pad(a, ((0, 0), (0, -S % self.pool), (0, 0)))
        if ctx is None or not ctx.packed:
            return a.reshape(B, -1, self.pool, a.shape[2])
        ends = jnp.pad((ctx.index - ctx.start + 1) % self.pool == 0, ((0, 0), (0, -S % self.pool)))
        ends = ends.reshape(B, -1, self.pool)
        # [B, J]: the last token of the pool at each place.
        last = jnp.argmax(ends, axis=2) + self.pool * jnp.arange(ends.shape[1])[None]
        tokens = last[..., None] + (jnp.arange(self.pool) - self.pool + 1)[None, None]
        return jax.vmap(lambda row, places: row[places])(a, jnp.maximum(tokens, 0))


class PooledIndexer(PoolIndexer):
    """Indexer of pools whose key is a mean of the keys of their tokens, weighted channel by channel (GLM-5.3-Flash).

    Nothing is rotated, and weights are stored and not trained.

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        head_dim: Width Hi of index queries and keys.
        pool: Tokens of a pool.
        rngs: Source of initial values.
        **options: Those of `Indexer`, whose `top_k` counts pools.
    """

    def __init__(self, dim: int, q_rank: int, *, head_dim: int, pool: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(q_rank, head_dim=head_dim, rngs=rngs, **options)
        shape, axes = (head_dim, dim), ("head_dim", "embed")
        self.k = Einsum("...D,HD->...H", shape, axes, gather_once=True, rngs=rngs)
        self.gate = Einsum("...D,HD->...H", shape, axes, gather_once=True, rngs=rngs)
        self.place = nnx.Param(jnp.zeros((pool, head_dim)), axes=("tap", "head_dim"))
        self.k_norm = LayerNorm(head_dim, eps=1e-6)
        self.weight = head_weights(dim, self.num_heads, rngs=rngs)
        self.pool = pool
        fix(self)

    @property
    def key_dim(self) -> int:
        """Numbers that a cache keeps of a token: its key, and the gate of each channel."""
        return 2 * self.dim

    def keys(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T key_dim"]:
        """Returns the keys and gates of tokens."""
        return jnp.concatenate([self.k_norm(self.k(x)), self.gate(x)], axis=-1)

    def compared(self, keys: Float[Array, "B S key_dim"], ctx: Context | None) -> Float[Array, "B J Hi"]:
        """Returns the keys of pools.

        Args:
            keys: Those of tokens (`keys`).
            ctx: Context of the tokens; None if each row is one document from its first key on.
        """
        # [B, J, pool, Hi], twice
        values, gates = jnp.split(self._pools(keys, ctx), 2, axis=-1)
        gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32)) + self.place[...][None, None]
        return jnp.sum(jax.nn.softmax(gates, axis=2).astype(values.dtype) * values, axis=2)

    def _rotate(self, x: Array, ctx: Any) -> Array:
        return x


class BlockIndexer(PoolIndexer):
    """Indexer of blocks whose key is a mean: `rotated(norm(mean(k(x))))`, by the position of the first token.

    A block's score is `sum over heads of relu(q . k) / sqrt(Hi)`. Weights are stored and not trained.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number I of index heads; all share one key.
        head_dim: Width Hi of index queries and keys.
        top_k: Blocks that a query attends to.
        block: Tokens of a block.
        rope: Rotation of the first `rope.dim` numbers of index queries and keys.
        norm_eps: Epsilon of the norms.
        rngs: Source of initial values.
    """

    rope: Rope | MRope

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        top_k: int,
        block: int,
        rope: Rope | MRope,
        norm_eps: float,
        rngs: nnx.Rngs,
    ):
        D, I, H = dim, num_heads, head_dim
        self.q = Einsum("...D,NHD->...NH", (I, H, D), ("heads", "head_dim", "embed"), gather_once=True, rngs=rngs)
        self.k = Einsum("...D,HD->...H", (H, D), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.q_norm = RMSNorm(H, eps=norm_eps, plus_one=True)
        self.k_norm = RMSNorm(H, eps=norm_eps, plus_one=True)
        self.dim, self.num_heads, self.top_k, self.pool, self.rope = H, I, top_k, block, rope
        fix(self)

    def of_blocks(
        self, x: Float[Array, "B T D"], keys: Float[Array, "B S Hi"], positions: Int[Array, "B S R"], ctx: Context,
        *, cached: bool,
    ) -> Index:  # fmt: skip
        """Returns what the scores of blocks are computed of.

        Args:
            x: Input of the layer.
            keys: `k(x)` of all tokens.
            positions: Those of all tokens.
            ctx: Values shared by all layers.
            cached: True if `keys` are those of a cache.
        """
        tokens = None if cached else ctx
        # [B, S, Hi] -> [B, J, block, Hi] -> [B, J, Hi]
        mean = self._pools(keys, tokens).astype(jnp.promote_types(x.dtype, jnp.float32)).mean(axis=2).astype(x.dtype)
        first = self._pools(positions, tokens)[:, :, 0]
        tables = self.rope.tables(first if isinstance(self.rope, MRope) else first[..., 0])
        blocks = self._turned(self.k_norm(mean)[:, :, None], *tables)[:, :, 0]
        q = self._rotate(self.q_norm(self.q(x)), ctx)
        weight = jnp.full(q.shape[:3], self.dim**-0.5, jnp.promote_types(x.dtype, jnp.float32))
        return Index(q, weight, blocks)
