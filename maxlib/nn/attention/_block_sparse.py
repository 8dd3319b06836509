"""Grouped-query attention to chosen blocks of keys (Qwen3.8-Flash-Next 2026).

Shapes: B rows, T new tokens, S keys, J places of blocks, D width, N heads, K key heads, I index heads of width Hi.
"""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.attention._grouped_query import Attention, attend, check_no_ring
from maxlib.nn.attention._index_loss import HIDDEN
from maxlib.nn.attention._indexer import BlockIndexer, chosen_mask
from maxlib.nn.cache import KVCache, SlotCache, put_rows
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.remat import mark_heads
from maxlib.ops import MRope, Rope


@pytree
class IndexedCache(SlotCache):
    """Cache of keys and values, of index keys, and of the positions by which keys of blocks are rotated.

    Attributes:
        kv: Keys and values.
        index: Index keys, `B S Hi`.
        positions: `B S R`, with R rows of positions.
    """

    kind: ClassVar[str | None] = "full"

    kv: KVCache
    index: Float[Array, "B S Hi"]
    positions: Int[Array, "B S R"]


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
        index_keys, positions = self.indexer.k(still), self._positions(ctx)
        bias, bounds = None, ctx.key_intervals(self.mask)
        if cache is not None:
            kv, k, v, *_ = cache.kv.extend(k, v, ctx, *bounds)
            index_keys, positions = put_rows(cache.index, index_keys, ctx), put_rows(cache.positions, positions, ctx)
            cache = IndexedCache(cast(KVCache, kv), index_keys, positions)
        if (num_keys := k.shape[1]) > self.top_k:
            check_no_ring(num_keys)
            index = self.indexer.of_blocks(still, index_keys, positions, ctx, cached=cache is not None)
            # [B, T, S] -> [B, 1, T, S]: the same for all heads.
            bias = jnp.where(chosen_mask(self.indexer.choose(index, bounds), num_keys), 0.0, HIDDEN)[:, None]
        out = attend(
            q,
            k.astype(q.dtype),
            v.astype(q.dtype),
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
        kv = cast(KVCache, super().init_cache(batch, capacity, dtype))
        index = jnp.zeros((batch, capacity, self.indexer.dim), dtype)
        positions = jnp.zeros((batch, capacity, 3 if isinstance(self.rope, MRope) else 1), jnp.int32)
        return IndexedCache(kv, index, positions)

    @property
    def kind(self) -> str:
        """Names the kind in tables."""
        return f"block-sparse {super().kind}"

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return *super().features, f"{self.top_k} chosen keys"
