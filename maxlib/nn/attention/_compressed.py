"""Attention to a window and to compressed keys (DeepSeek-AI 2026, DeepSeek V4).

Shapes: B rows, T new tokens, S keys, C entries, D width, N heads in G groups, H width of a head, R latent size.
"""

import dataclasses
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.nn._linear import Einsum
from maxlib.nn.attention._compressor import Compressor, rotate_last
from maxlib.nn.attention._entries import CompressedKVCache, EntryIndexer, attend_entries
from maxlib.nn.attention._indexer import Chosen
from maxlib.nn.attention._query_chunks import ALL_KEYS, HEADS, QUERIES
from maxlib.nn.cache import kv_cache
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm, UnitRMSNorm
from maxlib.nn.remat import mark_heads
from maxlib.ops import Causal, MaskHint, Rope, SlidingWindow, StaticMask
from maxlib.sharding import constrain, shard_map_by_name
from maxlib.sharding.layers import axis_size

_TOKENS = ("batch", "seq", "act_heads", None)
_KEYS = ("batch", None, None, None)


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
        self.indexer: Any = EntryIndexer(D, R, **options, **cast(Any, index)) if index else None
        self.head_norm, self.mask, self.rope = UnitRMSNorm(norm_eps), Causal() & SlidingWindow(window), rope
        self.num_heads, self.head_dim, self.groups, self.implementation = N, H, G, implementation

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: CompressedKVCache | None = None
    ) -> tuple[Float[Array, "B T D"], CompressedKVCache | None]:
        """Mixes the tokens of each document; arguments and results are those of `Attention`."""
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
        entries, chosen, caches = self._entries(x, latent, ctx, cache)
        # What kernels may know of the mask; with a cache they go by the bounds.
        hint = ctx.mask_hint(self.mask) if cache is None else None
        out = self._attend(
            q, keys.astype(q.dtype), bounds, hint, entries, chosen, alone=cache is None and not ctx.packed
        )
        out = rotate_last(out, cos, -sin, interleaved=self.rope.interleaved)
        out = checkpoint_name(out, "heads")
        # [B, T, N, H] -> [B, T, G, N / G * H]: neighbouring heads form a group.
        grouped = self.group_out(out.reshape(*out.shape[:2], self.groups, -1))
        return self.o(grouped), None if window is None else CompressedKVCache(window, *caches)

    def _entries(self, x: Array, latent: Array, ctx: Context, cache: CompressedKVCache | None) -> tuple[Any, ...]:
        """Returns the entries, those that each token attends to, and the caches."""
        if self.compressor is None:
            return None, None, (None, None)
        entries, kept = self.compressor(x, ctx, cache and cache.entries)
        seen = self.compressor.seen(ctx, kept)
        if self.indexer is None:
            return entries.astype(x.dtype), Chosen(*seen), (kept, None)
        # Nothing behind the choice has a gradient.
        still, still_latent = jax.lax.stop_gradient((x, latent))
        index_keys, index_kept = self.indexer.compressor(still, ctx, cache and cache.index)
        chosen = Chosen(*seen)
        if entries.shape[1] > self.indexer.top_k:
            chosen = self.indexer.choose(self.indexer.index(still, still_latent, index_keys, ctx), seen)
        return entries.astype(x.dtype), chosen, (kept, index_kept)

    def _attend(
        self,
        q: Array,
        keys: Array,
        bounds: Any,
        hint: MaskHint | None,
        entries: Array | None,
        chosen: Chosen | None,
        *,
        alone: bool,
    ) -> Array:
        """Attends to keys and entries under one softmax; each device computes its own queries and heads.

        `alone` says that each row is one document, whose first entry every query may see.
        """
        options: dict[str, Any] = {"scale": self.head_dim**-0.5, "implementation": self.implementation}
        static, segments = (None, None) if hint is None else hint
        if static is not None and axis_size("q_seq") > 1:
            static = dataclasses.replace(static, aligned=False)  # local query i is not aligned with key i

        def local(q, keys, start, end, sinks, of_queries, of_keys, entries, *chosen):
            ids = None if of_queries is None else (of_queries, of_keys)
            near = {"k_start": start, "k_end": end, "sinks": sinks, "return_lse": True}
            near_hint = None if static is None else MaskHint(static, ids)
            # Values are the keys, in their whole width.
            out, lse = ops.attention(q, keys, q.shape[-1], mask_hint=near_hint, **near, **options)
            if entries is None:
                return out
            far_hint = StaticMask("any") if alone else None
            far, far_lse = attend_entries(q, entries, Chosen(*chosen), mask_hint=far_hint, **options)
            # Two softmaxes are one, weighted by their sums: a token without entries has -inf, and a share of 1.
            share = jax.nn.sigmoid(lse - far_lse)[..., None]
            return (share * out + (1 - share) * far).astype(out.dtype)

        arrays = [q, keys, *bounds, self.sinks[...], *(segments or (None, None))]
        of_segments = (None, None) if segments is None else (QUERIES, _KEYS[:2])
        names = [HEADS, _KEYS, QUERIES, QUERIES, ("attn_heads",), *of_segments]
        if entries is None or chosen is None or not entries.shape[1]:  # the window only, or fewer tokens than an entry
            arrays, names = [*arrays, None], [*names, None]
        else:
            arrays += [entries, chosen.start, chosen.end, chosen.best]
            names += [ALL_KEYS, QUERIES, QUERIES, None if chosen.best is None else (*QUERIES, None)]
        return constrain(shard_map_by_name(local, names, HEADS)(*arrays), *_TOKENS)

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
