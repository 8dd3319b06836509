"""Grouped-query attention to chosen blocks of keys (Qwen3.8-Flash-Next 2026).

Shapes: B rows, T new tokens, S keys, J places of blocks, D width, N heads, K key heads, I index heads of width Hi.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.attention._grouped_query import Attention, attend, check_no_ring
from maxlib.nn.attention._index_loss import HIDDEN
from maxlib.nn.attention._indexer import chosen_mask
from maxlib.nn.attention._pool_indexer import BlockIndexer
from maxlib.nn.cache import LayerCache, put_rows
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.remat import mark_heads
from maxlib.ops import MRope, Rope


@pytree
class IndexedCache(LayerCache):
    """Cache of keys and values, of index keys, and of the positions by which keys of blocks are rotated.

    Attributes:
        k: Keys, `B S K H`.
        v: Values, `B S K H`.
        index: Index keys, `B S Hi`.
        positions: `B S R`, with R rows of positions.
    """

    can_rewind: ClassVar[bool] = True
    kind: ClassVar[str | None] = "full"

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    index: Float[Array, "B S Hi"]
    positions: Int[Array, "B S R"]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return self.k.shape[-3]

    def extend(self, new: "IndexedCache", ctx: Context) -> "IndexedCache":
        """Stores the new tokens."""
        return jax.tree.map(lambda old, rows: put_rows(old, rows, ctx), self, new)


class BlockSparseAttention(Attention):
    """Grouped-query attention to the blocks of keys that a `BlockIndexer` chooses, and to the tokens since the last.

    All keys are computed under a mask, and the choice is exact. Up to `top_k` keys a query attends to all of them.
    Tokens must be in order, and keys cannot travel around a ring: `CP_GATHER` and `CP_ULYSSES` split sequences.

    Args:
        dim: Width D of the residual stream.
        index_heads: Number of index heads.
        index_dim: Width of index queries and keys.
        top_k: Keys of the blocks that a query attends to.
        block: Tokens of a block, which divides `top_k`.
        rope: Rotation of queries and keys, and of those of the indexer.
        norm_eps: Epsilon of the indexer's norms.
        rngs: Source of initial values.
        **options: Those of `Attention` but `mask`, which is causal.

    Raises:
        ValueError: when `block` does not divide `top_k`; as for `Attention`.
    """

    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False
    takes_position_bias: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        *,
        index_heads: int,
        index_dim: int,
        top_k: int,
        block: int,
        rope: Rope | MRope,
        norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(dim, rope=rope, **options, rngs=rngs)
        if top_k % block:
            raise ValueError(f"block must divide top_k, got {block} and {top_k}")
        self.indexer = BlockIndexer(
            dim,
            num_heads=index_heads,
            head_dim=index_dim,
            top_k=top_k // block,
            block=block,
            rope=rope,
            norm_eps=norm_eps,
            rngs=rngs,
        )
        self.top_k = top_k

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: IndexedCache | None = None
    ) -> tuple[Float[Array, "B T D"], IndexedCache | None]:
        """Mixes the tokens of each document; see `Attention.__call__`."""
        ctx = context_of(x, ctx)
        q, k, v = map(mark_heads, self.project(x, ctx), ("q", "k", "v"))
        # No gradient passes through a choice.
        still = jax.lax.stop_gradient(x)
        tokens = IndexedCache(k, v, self.indexer.k(still), self._positions(ctx))
        if cache is not None:
            tokens = cache = cache.extend(tokens, ctx)
        bias, bounds = None, ctx.key_intervals(self.mask)
        if tokens.capacity > self.top_k:
            check_no_ring(tokens.capacity)
            index = self.indexer.of_blocks(still, tokens.index, tokens.positions, ctx, cached=cache is not None)
            # [B, T, S] -> [B, 1, T, S]: the same for all heads.
            bias = jnp.where(chosen_mask(self.indexer.choose(index, bounds), tokens.capacity), 0.0, HIDDEN)[:, None]
        out = attend(
            q,
            tokens.k.astype(q.dtype),
            tokens.v.astype(q.dtype),
            *bounds,
            None if self.sinks is None else self.sinks[...],
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            mask_hint=ctx.mask_hint(self.mask, cache),
            implementation=self.implementation,
        )
        if self.gate is not None and self.out_gate_act is not None:
            out = out * self.out_gate_act(self.gate(x))
        return self.o(checkpoint_name(out, "heads")), cache

    def _positions(self, ctx: Context) -> Int[Array, "B T R"]:
        """Returns as many rows of positions as the rotation can read; text has equal ones."""
        positions = ctx.positions if ctx.positions.ndim == 3 else ctx.positions[..., None]
        rows = 3 if isinstance(self.rope, MRope) else 1
        return jnp.broadcast_to(positions, (*positions.shape[:2], rows))

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> IndexedCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens."""
        heads = (batch, capacity, self.num_kv_heads, self.head_dim)
        index = jnp.zeros((batch, capacity, self.indexer.dim), dtype)
        positions = jnp.zeros((batch, capacity, 3 if isinstance(self.rope, MRope) else 1), jnp.int32)
        values = jnp.zeros((*heads[:3], self.v_dim), dtype)
        return IndexedCache(jnp.zeros(heads, dtype), values, index, positions)

    @property
    def kind(self) -> str:
        """Names the kind in tables."""
        return f"block-sparse {super().kind}"

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return *super().features, f"{self.top_k} chosen keys"
