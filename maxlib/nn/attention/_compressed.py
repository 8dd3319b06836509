"""Attention to a window and to compressed keys (DeepSeek-AI 2026, DeepSeek V4).

Shapes: B rows, T new tokens, S keys, C entries, D width, N heads in G groups, H width of a head, R latent size.
"""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.attention._compressor import Compressor, EntryCache, rotate_last
from maxlib.nn.attention._index_loss import Attended, IndexLoss
from maxlib.nn.attention._indexer import Chosen, Index, Indexer, fix, head_weights
from maxlib.nn.attention._joint_attention import attend_jointly
from maxlib.nn.cache import KVCache, LayerCache, RingCache, kv_cache
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm, UnitRMSNorm
from maxlib.nn.remat import mark_heads
from maxlib.ops import Causal, Rope, SlidingWindow
from maxlib.sharding import constrain

_TOKENS = ("batch", "seq", "act_heads", None)


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
        head_dim: Width of index queries and keys.
        rate: Tokens of an entry.
        rope: Rotation of the last `rope.dim` numbers of index queries and keys.
        norm_eps: Epsilon of the compressor's norm.
        trained: False for weights that are stored, but are no parameters.
        rngs: Source of initial values.
        **options: Those of `Indexer`, whose `top_k` counts entries.
    """

    def __init__(
        self,
        dim: int,
        q_rank: int,
        *,
        head_dim: int,
        rate: int,
        rope: Rope,
        norm_eps: float,
        trained: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(q_rank, head_dim=head_dim, rope=rope, rngs=rngs, **options)
        self.weight = head_weights(dim, self.num_heads, rngs=rngs)
        self.compressor = Compressor(dim, head_dim, rate=rate, overlap=True, rope=rope, norm_eps=norm_eps, rngs=rngs)
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


class CompressedAttention(SequenceMixer):
    """Attention to the last tokens as they are, and to all earlier ones as compressed keys, in one softmax.

    One key per token serves all heads, as key and as value: values are rotated by their position, so outputs are
    rotated back by the query's. Queries come from a latent and have a norm without weight. Outputs of each group of
    heads pass through a matrix of the group, then one matrix joins the groups. Each head has a sink.

        attn = nn.CompressedAttention(
            64, num_heads=4, head_dim=16, q_rank=32, groups=2, group_rank=24, window=128, rope=ops.Rope(8), rate=4,
            rngs=nnx.Rngs(0),
        )

    Tokens must be in order. Devices that split a sequence gather keys and entries, under any strategy.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of query heads.
        head_dim: Width H of a head.
        q_rank: Size R of the latent of queries.
        groups: Number G of groups of heads, which divides N.
        group_rank: Width of a group's output.
        window: Tokens that a query attends to as they are, its own included.
        rope: Rotation of the last `rope.dim` numbers of queries, keys and entries.
        rate: Tokens of an entry; None for the window alone.
        overlap: True if entries overlap (`Compressor`).
        index: `num_heads`, `head_dim` and `top_k` of an `Indexer` that chooses entries; None attends to all.
        index_loss: Loss that trains the indexer, reported by `with_loss`; None trains it not, and stores its weights
            as variables that are no parameters.
        norm_eps: Epsilon of all norms.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        ValueError: when `groups` does not divide `num_heads`, or there is an indexer without entries that overlap.
    """

    op: ClassVar[str | None] = "attention"

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        q_rank: int,
        groups: int,
        group_rank: int,
        window: int,
        rope: Rope,
        rate: int | None = None,
        overlap: bool = False,
        index: dict[str, int] | None = None,
        index_loss: IndexLoss | None = None,
        norm_eps: float = 1e-6,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, H, R, G = dim, num_heads, head_dim, q_rank, groups
        if G < 1 or N % G:
            raise ValueError(f"groups must divide num_heads; got {G} and {N}")
        if index is not None and not (rate and overlap):
            raise ValueError("an index chooses among entries that overlap: pass rate and overlap=True, or index=None")
        self.q_down = Einsum("...D,RD->...R", (R, D), ("rank", "embed"), rngs=rngs)
        self.q_norm = RMSNorm(R, eps=norm_eps)
        self.q_up = Einsum("...R,NHR->...NH", (N, H, R), ("heads", "head_dim", "rank"), rngs=rngs)
        self.kv = Einsum("...D,HD->...H", (H, D), ("head_dim", "embed"), rngs=rngs)
        self.kv_norm = RMSNorm(H, eps=norm_eps)
        self.sinks = nnx.Param(jnp.zeros(N), axes=("heads",))
        # [B, T, G, N / G * H] -> [B, T, G, rank] -> [B, T, D]
        self.group_out = Einsum(
            "...GF,GRF->...GR", (G, group_rank, N // G * H), ("heads", "rank", "head_dim"), rngs=rngs
        )
        self.o = Einsum("...GR,DGR->...D", (D, G, group_rank), ("embed", "heads", "rank"), rngs=rngs)
        options = {"rate": rate, "rope": rope, "norm_eps": norm_eps, "rngs": rngs}
        self.compressor: Any = Compressor(D, H, overlap=overlap, **options) if rate else None
        trained = index_loss is not None
        self.indexer: Any = EntryIndexer(D, R, trained=trained, **options, **cast(Any, index)) if index else None
        self.index_loss = index_loss if index else None
        self.head_norm, self.mask, self.rope = UnitRMSNorm(norm_eps), Causal() & SlidingWindow(window), rope
        self.num_heads, self.head_dim, self.groups, self.implementation = N, H, G, implementation

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: CompressedKVCache | None = None
    ) -> tuple[Float[Array, "B T D"], CompressedKVCache | None]:
        """Mixes the tokens of each document; arguments and results are those of `Attention`."""
        return self.with_loss(x, ctx, cache)[:2]

    def with_loss(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: CompressedKVCache | None = None
    ) -> tuple[Float[Array, "B T D"], CompressedKVCache | None, dict[str, Array]]:
        """Like `__call__`, and returns the loss of the indexer by name; none without `index_loss`, or with a cache."""
        ctx = context_of(x, ctx)
        cos, sin = ctx.rotary(self.rope)
        latent = checkpoint_name(self.q_norm(self.q_down(x)), "latent")
        q = self.head_norm(constrain(self.q_up(latent), *_TOKENS))
        q = mark_heads(rotate_last(q, cos, sin, interleaved=self.rope.interleaved), "q")
        # [B, T, H] -> [B, T, 1, H]
        keys = rotate_last(self.kv_norm(self.kv(x))[:, :, None], cos, sin, interleaved=self.rope.interleaved)
        keys, bounds = mark_heads(keys, "k"), ctx.key_intervals(self.mask)
        window: Any = None if cache is None else cache.window
        if window is not None:
            window, keys, _, *bounds = window.extend(keys, keys[..., :0], ctx, *bounds)
        loss = self.index_loss if cache is None else None
        entries, chosen, index, caches = self._entries(x, latent, ctx, cache, loss)
        # What kernels may know of the mask; with a cache they go by the bounds.
        hint = ctx.mask_hint(self.mask) if cache is None else None
        out, mass = attend_jointly(
            q,
            keys.astype(q.dtype),
            bounds,
            self.sinks[...],
            entries,
            chosen,
            scale=self.head_dim**-0.5,
            mask_hint=hint,
            alone=cache is None and not ctx.packed,
            implementation=self.implementation,
        )
        out = rotate_last(constrain(out, *_TOKENS), cos, -sin, interleaved=self.rope.interleaved)
        out = checkpoint_name(out, "heads")
        # [B, T, N, H] -> [B, T, G, N / G * H]: neighbouring heads form a group.
        grouped = self.group_out(out.reshape(*out.shape[:2], self.groups, -1))
        aux = {}
        if loss is not None and mass is not None:
            aux = {loss.name: loss(index, Attended(q, entries, chosen, self.head_dim**-0.5, mass))}
        return self.o(grouped), None if window is None else CompressedKVCache(window, *caches), aux

    def _entries(
        self, x: Array, latent: Array, ctx: Context, cache: CompressedKVCache | None, loss: IndexLoss | None
    ) -> tuple[Any, ...]:
        """Returns the entries, those that each token attends to, what index scores are computed of, and the caches."""
        if self.compressor is None:
            return None, None, None, (None, None)
        entries, kept = self.compressor(x, ctx, cache and cache.entries)
        seen = self.compressor.seen(ctx, kept)
        if self.indexer is None:
            return entries.astype(x.dtype), Chosen(*seen), None, (kept, None)
        # Nothing behind the choice has a gradient.
        still = jax.lax.stop_gradient((x, latent))
        index, chosen, index_kept = self.indexer.choice(*still, seen, ctx, cache and cache.index, loss)
        return entries.astype(x.dtype), chosen, index, (kept, index_kept)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> CompressedKVCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens."""
        window: Any = kv_cache(
            batch, capacity, num_kv_heads=1, k_dim=self.head_dim, v_dim=0, ring=self.mask.ring, dtype=dtype
        )
        entries = None if self.compressor is None else self.compressor.init_cache(batch, capacity, dtype)
        index = None if self.indexer is None else self.indexer.compressor.init_cache(batch, capacity, dtype)
        return CompressedKVCache(window, entries, index)

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes of keys that devices gather in a training step, and of the inputs of entries."""
        numbers = self.head_dim
        for compressor in (self.compressor, self.indexer and self.indexer.compressor):
            numbers += 0 if compressor is None else 2 * compressor.place.shape[1]
        total = split.tokens * split.parts * split.width * numbers
        return {"all-gather": (split.passes - 1) * total, "reduce-scatter": total}

    @property
    def kind(self) -> str:
        """Names the kind in tables."""
        if self.compressor is None:
            return "shared-key window attention"
        return "heavily compressed attention" if self.indexer is None else "compressed sparse attention"

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return ("sinks",) if self.indexer is None else ("sinks", f"{self.indexer.top_k} chosen entries")
