"""Attention to a window and to compressed keys (DeepSeek-AI 2026, DeepSeek V4): one entry for every few tokens of a
document, a mean weighted channel by channel.

Shapes: B rows, T new tokens, S keys, C entries, D width, N heads in G groups, H width of a head or an entry, R latent
size, U last inputs that a cache keeps.
"""

from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree, static
from maxlib.nn.attention._index_loss import Attended, IndexLoss
from maxlib.nn.attention._indexer import Chosen, Index, Indexer, fix, head_weights
from maxlib.nn.attention._joint_attention import attend_jointly
from maxlib.nn.cache import KVCache, LayerCache, RingCache, kv_cache
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm, UnitRMSNorm
from maxlib.nn.remat import mark_heads
from maxlib.ops import Causal, Rope, SlidingWindow, apply_rope
from maxlib.sharding import constrain


@pytree
class EntryCache(LayerCache):
    """Cache of a `Compressor`: its entries, and the inputs of those that are not complete.

    Attributes:
        entries: `B C H`; entry `i` is of the tokens from `i * rate` on.
        tail: The last inputs, `B U W`.
        rate: Tokens of an entry.
    """

    kind: ClassVar[str | None] = "compressed"

    entries: Float[Array, "B C H"]
    tail: Float[Array, "B U W"]
    rate: int = static()

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return (self.entries.shape[-2] + 1) * self.rate - 1


class Windows(NamedTuple):
    """The tokens of each entry: the place of the first one among the inputs, `B C`, and the entry's number, `B C`."""

    first: Int[Array, "B C"]
    number: Int[Array, "B C"]


class Compressor(nnx.Module):
    """Makes an entry of every `rate` tokens: `norm(sum_i softmax_i(gate(x_i) + place_i) * kv(x_i))` per channel.

    An entry is rotated by the position of its first token. With `overlap` it is also made of the `rate` tokens before:
    `kv` and `gate` have twice the width, of which the first half counts for the next entry and the second half for a
    token's own. Entries count from the first token of a document, and an entry exists when its last token does.

    Args:
        dim: Width D of the residual stream.
        head_dim: Width H of an entry.
        rate: Tokens of an entry.
        overlap: True if entries overlap.
        rope: Rotation of the last `rope.dim` numbers of an entry.
        norm_eps: Epsilon of the norm.
        rngs: Source of initial values.
    """

    def __init__(
        self, dim: int, head_dim: int, *, rate: int, overlap: bool, rope: Rope, norm_eps: float, rngs: nnx.Rngs
    ):
        width = 2 * head_dim if overlap else head_dim
        self.kv = Einsum("...D,HD->...H", (width, dim), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.gate = Einsum("...D,HD->...H", (width, dim), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.place = nnx.Param(jnp.zeros((rate, width)), axes=("tap", "head_dim"))
        self.norm = RMSNorm(head_dim, eps=norm_eps)
        self.head_dim, self.rate, self.overlap, self.rope = head_dim, rate, overlap, rope

    @property
    def reach(self) -> int:
        """Tokens of which an entry is made."""
        return 2 * self.rate if self.overlap else self.rate

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context, cache: EntryCache | None = None
    ) -> tuple[Float[Array, "B C H"], EntryCache | None]:
        """Returns the entries, with a cache also those of earlier tokens, and the new cache."""
        # [B, T, 2 W]: values, then gates.
        inputs = jnp.concatenate([self.kv(x), self.gate(x)], axis=-1)
        pool = jax.checkpoint(type(self)._pool, prevent_cse=False)
        if cache is None:
            # Without packing the entries lie one after the other from the first token on.
            return pool(self, inputs, self._windows(ctx) if ctx.packed else None), None
        joined = jnp.concatenate([cache.tail, inputs.astype(cache.tail.dtype)], axis=1)
        windows, complete = self._new_windows(ctx, inputs.shape[1])
        entries = pool(self, joined, windows).astype(cache.entries.dtype)
        rows = jnp.arange(x.shape[0])[:, None]
        slot = jnp.where(complete, windows.number, cache.entries.shape[1])  # no such slot: dropped
        entries = cache.entries.at[rows, slot].set(entries, mode="drop")
        last = ctx.num_new[:, None] + jnp.arange(self.reach - 1)[None]
        return entries, EntryCache(entries, joined[rows, last], self.rate)

    def seen(self, ctx: Context, cache: EntryCache | None = None) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Returns the first entry that each token attends to, and one past the last: the complete ones of its
        document.
        """
        count = self._count(ctx)
        end = count if cache is not None else jnp.cumsum(self._is_last(ctx), axis=1, dtype=jnp.int32)
        return end - count, end

    def _count(self, ctx: Context) -> Int[Array, "B T"]:
        """Returns how many entries of its document are complete after each token."""
        count = (ctx.index - ctx.start + 1) // self.rate
        return count if ctx.valid is None else jnp.where(ctx.valid, count, 0)

    def _is_last(self, ctx: Context) -> Bool[Array, "B T"]:
        """Returns True for the last token of an entry."""
        last = (ctx.index - ctx.start + 1) % self.rate == 0
        return last if ctx.valid is None else last & ctx.valid

    def _windows(self, ctx: Context) -> Windows:
        """Returns the tokens of the entries of packed rows, in their order; what is left over is hidden from all."""
        last = self._is_last(ctx)
        B, T = last.shape
        entry = jnp.where(last, jnp.cumsum(last, axis=1, dtype=jnp.int32) - 1, T)
        first = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None] - self.rate + 1, (B, T))
        rows, empty = jnp.arange(B)[:, None], jnp.zeros((B, T // self.rate), jnp.int32)
        return Windows(*(empty.at[rows, entry].set(a, mode="drop") for a in (first, self._count(ctx) - 1)))

    def _new_windows(self, ctx: Context, new: int) -> tuple[Windows, Bool[Array, "B C"]]:
        """Returns the tokens of the entries that `new` tokens may complete, and which they do complete.

        The inputs begin with the last `reach - 1` ones of earlier tokens.
        """
        done = (ctx.length // self.rate)[:, None]
        number = done + jnp.arange(-(-new // self.rate))[None]
        first = number * self.rate - ctx.length[:, None] + self.reach - 1
        return Windows(first, number), (number + 1) * self.rate <= (ctx.length + ctx.num_new)[:, None]

    def _pool(self, inputs: Float[Array, "B T W"], windows: Windows | None) -> Float[Array, "B C H"]:
        """Returns the entries of some inputs."""
        # [B, T, 2 W] -> [B, C, reach, 2 W]
        taken = self._taken(inputs, windows)
        B, C = taken.shape[:2]
        number = jnp.broadcast_to(jnp.arange(C)[None], (B, C)) if windows is None else windows.number
        values, gates = jnp.split(taken.astype(jnp.promote_types(inputs.dtype, jnp.float32)), 2, axis=-1)
        gates = gates + jnp.tile(self.place[...], (self.reach // self.rate, 1))[None, None]
        if self.overlap:
            values, gates = self._halves(values), self._halves(gates)
            # The first entry of a document has no tokens before it.
            before = (number == 0)[:, :, None] & (jnp.arange(self.reach) < self.rate)[None, None]
            gates = jnp.where(before[..., None], -jnp.inf, gates)
        pooled = self.norm(jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)).astype(inputs.dtype)
        tables = self.rope.tables(number * self.rate)
        return rotate_last(pooled[:, :, None], *tables, interleaved=self.rope.interleaved)[:, :, 0]

    def _taken(self, inputs: Float[Array, "B T W"], windows: Windows | None) -> Float[Array, "B C reach W"]:
        """Returns the inputs of each entry."""
        before = self.reach - self.rate
        if windows is not None:
            # [B, C, reach]
            place = windows.first[..., None] - before + jnp.arange(self.reach)[None, None]
            return jax.vmap(lambda row, place: row[place])(inputs, jnp.maximum(place, 0))
        B, T, W = inputs.shape
        windows_of_row = inputs[:, : T // self.rate * self.rate].reshape(B, T // self.rate, self.rate, W)
        if not before:
            return windows_of_row
        earlier = jnp.pad(windows_of_row, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        return jnp.concatenate([earlier, windows_of_row], axis=2)

    def _halves(self, x: Float[Array, "B C reach W"]) -> Float[Array, "B C reach H"]:
        """Returns the first half of the tokens before, and the second half of an entry's own."""
        return jnp.concatenate([x[:, :, : self.rate, : self.head_dim], x[:, :, self.rate :, self.head_dim :]], axis=2)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> EntryCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens."""
        entries = jnp.zeros((batch, max(capacity // self.rate, 1), self.head_dim), dtype)
        return EntryCache(entries, jnp.zeros((batch, self.reach - 1, 2 * self.place.shape[1]), dtype), self.rate)


def rotate_last(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool,
) -> Float[Array, "B T N H"]:
    """Rotates the last `2 * half` numbers of each head; `-sin` rotates back."""
    rest, turned = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([rest, apply_rope(turned, cos, sin, interleaved=interleaved)], axis=-1)


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
