"""Choice of compressed keys by an indexer, and the cache of a layer with them.

Shapes: B rows, T tokens, R latent size.
"""

from typing import ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.attention._compressor import Compressor, EntryCache, rotate_last
from maxlib.nn.attention._index_loss import IndexLoss
from maxlib.nn.attention._indexer import Chosen, Index, Indexer, fix
from maxlib.nn.cache import KVCache, LayerCache, RingCache
from maxlib.nn.decoder._context import Context
from maxlib.ops import Rope


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
    """Indexer of compressed keys, which it makes by a compressor of its own.

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        num_heads: Number of index heads.
        head_dim: Width of index queries and keys.
        top_k: Entries that a query attends to.
        rate: Tokens of an entry.
        rope: Rotation of the last `rope.dim` numbers of index queries and keys.
        norm_eps: Epsilon of the compressor's norm.
        trained: False for weights that are stored, but are no parameters.
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
        trained: bool = False,
        rngs: nnx.Rngs,
    ):
        D, R, I, H = dim, q_rank, num_heads, head_dim
        self.q = Einsum("...R,NHR->...NH", (I, H, R), ("heads", "head_dim", "rank"), gather_once=True, rngs=rngs)
        self.weight = Einsum("...D,ND->...N", (I, D), ("heads", "embed"), rngs=rngs)
        self.compressor = Compressor(D, H, rate=rate, overlap=True, rope=rope, norm_eps=norm_eps, rngs=rngs)
        self.dim, self.num_heads, self.top_k, self.rope = H, I, top_k, rope
        if not trained:
            fix(self)

    def choice(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T R"],
        seen: tuple[Int[Array, "B T"], Int[Array, "B T"]],
        ctx: Context,
        cache: EntryCache | None,
        loss: IndexLoss | None,
    ) -> tuple[Index | None, Chosen, EntryCache | None]:
        """Returns what scores are computed of, None if nobody needs it, the entries to attend to, and the new cache.

        Args:
            x: Input of the layer.
            latent: The normed latent of queries.
            seen: First entry that each token may attend to, and one past the last.
            ctx: Values shared by all layers.
            cache: Index keys of earlier tokens.
            loss: The loss that is computed of the index.
        """
        keys, cache = self.compressor(x, ctx, cache)
        few, is_dense = keys.shape[1] <= self.top_k, loss is not None and loss.dense
        index = None if few and loss is None else self.index(x, latent, keys, ctx)
        if index is None or few or is_dense:
            return index, Chosen(*seen), cache
        return index, self.choose(index, seen), cache

    def _rotate(self, x: Array, ctx: Context) -> Array:
        return rotate_last(x, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)
