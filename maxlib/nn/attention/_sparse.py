"""Sparse latent attention (DeepSeek-AI 2025, DeepSeek-V3.2): a small indexer chooses the keys that a query attends to.

Shapes: B rows, T new tokens, S keys, K chosen keys, D width, N heads, Hi width of index keys, R latent size with the
shared key.
"""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.attention._grouped_query import check_no_ring
from maxlib.nn.attention._index_loss import HIDDEN, Attended, IndexLoss
from maxlib.nn.attention._indexer import (
    ALL_KEYS,
    HEADS,
    QUERIES,
    Chosen,
    Index,
    LightningIndexer,
    PooledIndexer,
    chosen_mask,
    over_queries,
)
from maxlib.nn.attention._latent import MLA
from maxlib.nn.cache import LatentCache, SlotCache, put_rows
from maxlib.nn.decoder._context import Context, check_prefix, context_of
from maxlib.nn.remat import mark_heads
from maxlib.ops import Rope
from maxlib.sharding import constrain, shard_map_by_name


@pytree
class IndexedLatentCache(SlotCache):
    """Cache of each token's latent with the shared key part, and of its index key.

    Attributes:
        latent: As in a `LatentCache`, `B S R`.
        index: Index keys, `B S Hi`.
    """

    kind: ClassVar[str | None] = "latent"

    latent: Float[Array, "B S R"]
    index: Float[Array, "B S Hi"]

    def extend(self, latent: Array, index: Array, ctx: Context) -> "IndexedLatentCache":
        """Stores the new tokens."""
        return IndexedLatentCache(put_rows(self.latent, latent, ctx), put_rows(self.index, index, ctx))


class SparseMLA(MLA):
    """Latent attention to the keys that a `LightningIndexer` chooses; to all of them while there are no more than that.

    The choice is exact. Attention to chosen keys either gathers their latents, or computes all keys under a mask,
    whichever multiplies less: decoding gathers, and so do sequences of many times `top_k` tokens. Tokens must be in
    order, and keys cannot travel around a ring: `CP_GATHER` and `CP_ULYSSES` split sequences.

    Args:
        dim: Width D of the residual stream.
        index_heads: Number of index heads.
        index_dim: Width of index queries and keys.
        top_k: Keys that a query attends to.
        index_rope: Rotation within the indexer; None for pools, which nothing rotates.
        pool: Tokens of a pool, for an indexer that chooses pools (`PooledIndexer`); None for single keys.
        index_loss: Loss that trains the indexer, reported by `with_loss`; None trains it not, and stores its weights
            as variables that are no parameters.
        shared: True for a layer without an indexer, which attends to the choice of an earlier layer (`with_choice`).
        gather: True gathers the latents of chosen keys, False computes all keys under a mask; None chooses.
        rngs: Source of initial values.
        **options: Those of `MLA`; `q_rank` is a number.
    """

    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False
    kind: ClassVar[str | None] = "sparse MLA"

    indexer: Any

    def __init__(
        self,
        dim: int,
        *,
        index_heads: int,
        index_dim: int,
        top_k: int,
        index_rope: Rope | None,
        pool: int | None = None,
        index_loss: IndexLoss | None = None,
        shared: bool = False,
        gather: bool | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(dim, **options, rngs=rngs)
        if shared:
            self.indexer = None
        elif pool is not None:
            _check_pools(top_k, pool, index_loss)
            self.indexer = PooledIndexer(
                dim,
                options["q_rank"],
                num_heads=index_heads,
                head_dim=index_dim,
                top_k=top_k // pool,
                pool=pool,
                rngs=rngs,
            )
        else:
            self.indexer = LightningIndexer(
                dim,
                options["q_rank"],
                num_heads=index_heads,
                head_dim=index_dim,
                top_k=top_k,
                rope=cast(Rope, index_rope),
                trained=index_loss is not None,
                rngs=rngs,
            )
        self.top_k, self.index_loss, self.gather = top_k, None if shared else index_loss, gather

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: IndexedLatentCache | None = None
    ) -> tuple[Float[Array, "B T D"], IndexedLatentCache | None]:
        """Mixes the tokens of each document; see `MLA.__call__`."""
        return self.with_loss(x, ctx, cache)[:2]

    def with_loss(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: IndexedLatentCache | None = None
    ) -> tuple[Float[Array, "B T D"], IndexedLatentCache | None, dict[str, Array]]:
        """Like `__call__`, but also returns the loss of the indexer by name; none without `index_loss`, or with a
        cache.
        """
        return self.with_choice(x, ctx, cache)[:3]

    def with_choice(
        self,
        x: Float[Array, "B T D"],
        ctx: Context | None = None,
        cache: Any = None,
        best: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Array], Int[Array, "B T K"] | None]:
        """Like `with_loss`, but takes and returns chosen keys.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers.
            cache: Cache of earlier tokens, or None.
            best: The keys that an earlier layer chose, for a layer that shares them; None for all visible ones.

        Returns:
            The output, the cache, the loss by name, and the chosen keys; None for all visible ones.
        """
        ctx = context_of(x, ctx)
        q, latent = mark_heads(self.queries(x, ctx), "q"), checkpoint_name(self.latents(x, ctx), "latent")
        # Nothing behind an index has a gradient: the choice is a step function, and its loss trains the indexer alone.
        still = jax.lax.stop_gradient(x)
        index_keys = None if self.indexer is None else self.indexer.keys(still, ctx)
        if cache is not None:
            q = check_prefix(q, self.mask, ctx)
            cache = cache.extend(latent, *([] if index_keys is None else [index_keys]), ctx)
            latent, index_keys = cache.latent, None if index_keys is None else cache.index
        latent, loss = latent.astype(x.dtype), None if cache is not None else self.index_loss
        if index_keys is None or self.indexer is None:
            index, chosen = None, Chosen(*ctx.key_intervals(self.mask), best)
        else:
            index_keys = self.indexer.compared(index_keys, ctx if cache is None else None)
            index, chosen = self._choose(still, index_keys, latent.shape[1], ctx, loss)
        if self._gathers(chosen, latent):
            out = self._from_chosen(self._attended(q, latent, chosen))
        else:
            out = self._from_all(q, latent, chosen, ctx, cache)
        aux = {} if loss is None else {loss.name: loss(cast(Any, index), self._attended(q, latent, chosen))}
        return self.o(checkpoint_name(out, "heads")), cache, aux, chosen.best

    def _choose(
        self, x: Array, keys: Array, num_tokens: int, ctx: Context, loss: IndexLoss | None
    ) -> tuple[Any, Chosen]:
        """Returns what the indexer's scores are computed of, None if nobody needs it, and the keys to attend to."""
        bounds, few = ctx.key_intervals(self.mask), num_tokens <= self.top_k
        index = None if few and loss is None else self._index(x, keys, ctx)
        if index is None or few or (loss is not None and loss.dense):
            return index, Chosen(*bounds)
        assert self.indexer is not None
        return index, self.indexer.choose(index, bounds)

    def _index(self, x: Array, keys: Array, ctx: Context) -> Index:
        """Returns what the indexer's scores are computed of."""
        assert self.q_down is not None and self.q_norm is not None and self.indexer is not None
        return self.indexer.index(x, jax.lax.stop_gradient(self.q_norm(self.q_down(x))), keys, ctx)

    def _gathers(self, chosen: Chosen, latent: Float[Array, "B S R"]) -> bool:
        """Returns True where the latents of chosen keys are gathered.

        A latent takes the place of a head's key and value, but is wider: with the sizes of DeepSeek V3.2 a product with
        one costs as much as with 3.4 keys, of which a causal mask hides half. Gathering must halve the products: one by
        query, they take twice the time (measured on CPUs), and the others need no gathering.
        """
        if chosen.best is None:
            return False
        check_no_ring(latent.shape[1])
        if self.gather is not None:
            return self.gather
        (_, T, K), S = chosen.best.shape, latent.shape[1]
        per_latent = self.kv_rank * (
            self.nope_dim + self.v_dim
        )  # a head's key and value from a latent; or query and output
        key, wide = self.nope_dim + self.shared_dim + self.v_dim, 2 * self.kv_rank + self.shared_dim
        return T * per_latent + 2 * T * K * wide < S * per_latent + T * S * key // 2

    def _attended(self, q: Array, latent: Array, chosen: Chosen) -> Attended:
        """Returns what probabilities are computed of: all keys, or the latents of chosen ones."""
        if chosen.best is None:
            return Attended(q, self._keys(latent), chosen, self.scale)
        return Attended(self._absorb(q), latent, chosen, self.scale)

    def _from_all(self, q: Array, latent: Array, chosen: Chosen, ctx: Context, cache: Any) -> Array:
        """Attends to all keys, of which a mask hides those that were not chosen."""
        bias = None
        if chosen.best is not None:
            # [B, T, S] -> [B, 1, T, S]: the same for all heads.
            bias = jnp.where(chosen_mask(chosen, latent.shape[1]), 0.0, HIDDEN)[:, None]
        run = self._absorbed if cache is not None and q.shape[1] == 1 else self._naive
        return run(q, latent, ctx, ctx.mask_hint(self.mask, cache), bias)

    def _from_chosen(self, attended: Attended) -> Float[Array, "B T N Hv"]:
        """Attends to the gathered latents of chosen keys; the backward pass gathers again."""

        def local(q, latent, *chosen):
            attended_here = Attended(q, latent, Chosen(*chosen), self.scale)
            if q.shape[1] > 1:
                # The gradients of a latent from several chunks are added up in float32.
                latent = latent.astype(jnp.promote_types(latent.dtype, jnp.float32))

            def step(carry, chunk):
                attended_chunk = attended_here.of(*chunk)
                keys = attended_chunk.read(latent)
                probs = attended_chunk.probabilities(keys, attended_chunk.seen()).astype(q.dtype)
                # [B, N, C, K] and [B, C, K, R] -> [B, C, N, R]
                return carry, jnp.einsum("bntk,btkr->btnr", probs, keys[..., : self.kv_rank])

            assert attended_here.chosen.best is not None
            width = (q.shape[2] + q.shape[3]) * attended_here.chosen.best.shape[2]
            return over_queries(jax.checkpoint(step), None, (q, attended_here.chosen), per_query=width)[1]

        names, chosen = [HEADS, ALL_KEYS, QUERIES, QUERIES, (*QUERIES, None)], attended.chosen
        run = shard_map_by_name(local, names, HEADS)
        out = run(attended.q, attended.keys, chosen.start, chosen.end, chosen.best)
        out = checkpoint_name(constrain(out, "batch", "seq", "act_heads", None), "attention_out")
        return self.v_up.product("BTNR,NHR->BTNH", out)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens; one that shares a choice has no index."""
        latent = jnp.zeros((batch, capacity, self.kv_rank + self.shared_dim), dtype)
        if self.indexer is None:
            return LatentCache(latent)
        return IndexedLatentCache(latent, jnp.zeros((batch, capacity, self.indexer.key_dim), dtype))

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return (f"{self.top_k} chosen keys" if self.indexer is not None else "shared choices",)


def _check_pools(top_k: int, pool: int, index_loss: IndexLoss | None) -> None:
    if top_k % pool or index_loss is not None:
        raise ValueError(
            f"pool must divide top_k, and index_loss be None, as an IndexLoss compares single keys; got {pool}, {top_k} and "
            f"{index_loss}"
        )
