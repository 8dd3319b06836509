"""Sparse latent attention (DeepSeek-AI 2025, DeepSeek-V3.2): a small indexer chooses the keys that a query attends to.

Shapes: B rows, T new tokens, S keys, D width, I index heads of width Hi, R latent size of queries.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._context import Context, context
from maxlib.nn._linear import Einsum
from maxlib.nn._mla import MLA
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import LayerCache, put_rows
from maxlib.nn.norm import LayerNorm
from maxlib.nn.remat import mark_heads
from maxlib.ops._rope import Rope, apply_rope
from maxlib.sharding import constrain

HIDDEN = -1e30  # of a key that is not chosen, before the softmax


@pytree
class IndexedLatentCache(LayerCache):
    """Cache of each token's latent with the shared key part, and of its index key.

    Attributes:
        latent: As in a `LatentCache`, `B S R`.
        index: Index keys, `B S Hi`.
    """

    can_rewind: ClassVar[bool] = True
    kind: ClassVar[str | None] = "latent"

    latent: Float[Array, "B S R"]
    index: Float[Array, "B S Hi"]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return self.latent.shape[-2]

    def extend(self, latent: Array, index: Array, ctx: Context) -> "IndexedLatentCache":
        """Stores the new tokens."""
        return IndexedLatentCache(put_rows(self.latent, latent, ctx), put_rows(self.index, index, ctx))


class LightningIndexer(nnx.Module):
    """Scores keys for queries, `sum over heads of w relu(q . k) / sqrt(Hi I)`; the best `top_k` are attended to.

    No gradient passes through the choice, so its weights are stored but not trained.

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        num_heads: Number I of index heads; all share one key.
        head_dim: Width Hi of index queries and keys.
        top_k: Keys that a query attends to.
        rope: Rotation of the first `rope.dim` numbers of index queries and keys.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, q_rank: int, *, num_heads: int, head_dim: int, top_k: int, rope: Rope, rngs: nnx.Rngs):
        D, R, I, H = dim, q_rank, num_heads, head_dim
        # Queries are made of the latent that the layer's own queries are made of.
        self.q = Einsum("...R,NHR->...NH", (I, H, R), ("heads", "head_dim", "rank"), gather_once=True, rngs=rngs)
        self.k = Einsum("...D,HD->...H", (H, D), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.k_norm = LayerNorm(H, eps=1e-6)
        self.weight = Einsum("...D,ND->...N", (I, D), ("heads", "embed"), rngs=rngs)
        for part, names in ((self.q, "w"), (self.k, "w"), (self.k_norm, "scale bias"), (self.weight, "w")):
            for name in names.split():
                _fix(part, name)
        self.dim, self.top_k, self.rope, self.scale = H, top_k, rope, (H * I) ** -0.5

    def keys(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T Hi"]:
        """Returns the index keys of tokens."""
        return self._rotate(self.k_norm(self.k(x))[:, :, None], ctx)[:, :, 0]

    def chosen(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T R"],
        keys: Float[Array, "B S Hi"],
        bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]],
        ctx: Context,
    ) -> Bool[Array, "B T S"]:
        """Returns True for the keys of each query's interval that it attends to.

        Args:
            x: Input of the layer.
            latent: The normed latent of queries.
            keys: Index keys of all tokens.
            bounds: First key and the key after the last one of every query.
            ctx: Values shared by all layers.
        """
        wide = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32))
        q, weight = self._rotate(self.q(latent), ctx), wide(self.weight(x))
        # [B, T, I, Hi] and [B, S, Hi] -> [B, T, I, S] -> [B, T, S]
        # A head that disagrees says nothing; one that agrees counts by a weight of the query, which may be negative.
        scores = jax.nn.relu(jnp.einsum("btnh,bsh->btns", wide(q), wide(keys), precision="highest"))
        scores = self.scale * jnp.einsum("btn,btns->bts", weight, scores, precision="highest")
        place, (start, end) = jnp.arange(keys.shape[1])[None, None], bounds
        visible = (place >= start[..., None]) & (place < end[..., None])
        _, best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), self.top_k)
        # [B, T, top_k] places -> [B, T, S]. Of equal scores the earlier key is chosen; hidden keys fill what is left.
        rows, queries = jnp.arange(len(best))[:, None, None], jnp.arange(best.shape[1])[None, :, None]
        return jnp.zeros(visible.shape, bool).at[rows, queries, best].set(True) & visible

    def _rotate(self, x: Array, ctx: Context) -> Array:
        """Rotates the first numbers of each head, `B T N Hi`."""
        # [B, T, N, Hi] -> the part that knows its position, and the rest.
        turned, rest = jnp.split(x, [self.rope.dim], axis=-1)
        turned = apply_rope(turned, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)
        return jnp.concatenate([turned, rest], axis=-1)


def _fix(part: Any, name: str) -> None:
    """Makes a parameter a variable that is stored and not trained."""
    old = getattr(part, name)
    setattr(part, name, nnx.Variable(old.get_value(), **old.get_metadata()))


class SparseMLA(MLA):
    """Latent attention to the keys that a `LightningIndexer` chooses; to all of them while there are no more than that.

    The choice is exact, by a mask over all keys, which saves no time. Tokens must be in order, and keys cannot travel
    around a ring: `CP_GATHER` and `CP_ULYSSES` split sequences.

    Args:
        dim: Width D of the residual stream.
        index_heads: Number of index heads.
        index_dim: Width of index queries and keys.
        top_k: Keys that a query attends to.
        index_rope: Rotation within the indexer.
        rngs: Source of initial values.
        **options: Those of `MLA`; `q_rank` is a number.
    """

    reorderable: ClassVar[bool] = False
    quantizable_cache: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        *,
        index_heads: int,
        index_dim: int,
        top_k: int,
        index_rope: Rope,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(dim, **options, rngs=rngs)
        sizes: Any = dict(num_heads=index_heads, head_dim=index_dim, top_k=top_k, rope=index_rope)
        self.indexer = LightningIndexer(dim, options["q_rank"], **sizes, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: IndexedLatentCache | None = None
    ) -> tuple[Float[Array, "B T D"], IndexedLatentCache | None]:
        """Mixes the tokens of each document; see `MLA.__call__`."""
        ctx = context(*x.shape[:2]) if ctx is None else ctx
        q, latent = mark_heads(self.queries(x, ctx), "q"), checkpoint_name(self.latents(x, ctx), "latent")
        # The choice is a step function of its scores: nothing behind it has a gradient.
        still = jax.lax.stop_gradient(x)
        index = self.indexer.keys(still, ctx)
        if cache is not None:
            cache = cache.extend(latent, index, ctx)
            latent, index = cache.latent, cache.index
        bias = self._bias(still, index, ctx)
        run = self._absorbed if cache is not None and x.shape[1] == 1 else self._naive
        return self.o(run(q, latent.astype(x.dtype), ctx, ctx.mask_hint(self.mask, cache), bias)), cache

    def _bias(self, x: Array, index: Array, ctx: Context) -> Float[Array, "B 1 T S"] | None:
        """Returns what is added to scores so that only chosen keys count; None if all keys are chosen."""
        if index.shape[1] <= self.indexer.top_k:
            return None
        assert self.q_down is not None and self.q_norm is not None
        latent = jax.lax.stop_gradient(self.q_norm(self.q_down(x)))
        chosen = self.indexer.chosen(x, latent, index.astype(x.dtype), ctx.key_intervals(self.mask), ctx)
        # [B, T, S] -> [B, 1, T, S]: the same for all heads.
        bias = jax.lax.stop_gradient(jnp.where(chosen, 0.0, HIDDEN))[:, None]
        return constrain(bias, "batch", None, "seq", None)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> IndexedLatentCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens."""
        zeros = lambda width: jnp.zeros((batch, capacity, width), dtype)
        return IndexedLatentCache(zeros(self.kv_rank + self.shared_dim), zeros(self.indexer.dim))

    @property
    def kind(self) -> str:
        """Names the kind in tables."""
        return "sparse MLA"

    def features(self) -> Iterator[str]:
        """Yields the labels of its options for tables."""
        yield f"{self.indexer.top_k} chosen keys"
