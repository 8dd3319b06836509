"""Caches: what layers store about earlier tokens. They are immutable values, passed in and returned.

A layer's cache is any pytree whose arrays begin with the axis of rows. A class derived from `LayerCache` declares
whether it can be rewound and its name in tables; any other pytree counts as a state that cannot be rewound.

A cache of keys and values decides where keys are stored. `extend` stores the new ones and returns the arrays to attend
to, with key intervals that index *those* arrays. Rows may have different lengths: `ctx.length` counts each row's cached
tokens, `ctx.num_new` its new ones (they come first; padding follows).

Keys and values are stored heads first, `B K S H`: a head's keys are one matrix. Attention takes `B S K H` from all
layers and puts heads first itself, so within a program its transposition cancels that of a cache (`heads_first`).

Shapes: B rows, T new tokens, S slots, W slots of a ring, K key heads of width Hk, values of width Hv, R latent size.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jaxtyping import Array, Float, Int, Num, Real

from maxlib.nn._pytree import pytree, static
from maxlib.nn.decoder._context import Context, is_known
from maxlib.ops import MaskHint, StaticMask

Extended = tuple["AttentionCache", Array, Array, Array, Array]
Ordered = tuple[Array, Array, Int[Array, " B"]]


@pytree
class Cache:
    """Cache of a whole model: one entry per layer, stored like its stacks, and values that all layers share.

    Args:
        layers: Caches from `Stack.init_cache`.
        length: `B`, tokens cached so far in each row.
        rope_length: A fixed length for length-dependent rotary scalings (dynamic NTK, LongRoPE); None for the current
            length of each row, as in transformers.
        position_offset: `B`, difference between positions and the number of tokens, for example after an image with
            positions on a grid; None if positions count tokens.
    """

    layers: Any
    length: Int[Array, " B"]
    rope_length: int | None = static(default=None)
    position_offset: Real[Array, " B"] | None = None

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens in a row; None if no layer has a limit (rings, recurrent states)."""
        limits = [cache.capacity for cache in layer_caches(self.layers) if isinstance(cache, LayerCache)]
        return min((slots for slots in limits if slots is not None), default=None)

    def check_room(self, num_new: Int[Array, " B"]) -> None:
        """Raises ValueError if a row cannot hold `num_new` more tokens. Inside jit lengths are not known, and layers
        drop tokens that do not fit.
        """
        if self.capacity is None or not (is_known(self.length) and is_known(num_new)):
            return
        if (most := int(np.max(np.asarray(self.length) + np.asarray(num_new), initial=0))) > self.capacity:
            raise ValueError(
                f"a row of {most} tokens, cached and new ones, does not fit a cache of capacity {self.capacity}; make "
                "a larger one, or cache fewer"
            )

    def advanced(self, layers: Any, ctx: Context) -> "Cache":
        """Returns the cache after a forward pass."""
        # Each row grows by its real tokens, without padding.
        return Cache(layers, self.length + ctx.num_new, self.rope_length, ctx.next_position_offset)


class LayerCache:
    """Base class of one layer's cache: a pytree (`nn.pytree`) whose arrays begin with the axis of rows.

    Attributes:
        can_rewind: True if a smaller `ctx.length` is enough to forget tokens, because slots after it are overwritten
            before they are read. Speculative decoding needs this to take back a rejected draft.
        kind: Name in tables; None means the name of the class.
    """

    can_rewind: ClassVar[bool] = False
    kind: ClassVar[str | None] = None

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens that a row can hold; None without a limit."""
        return None

    def key_order(self, ctx: Context) -> "KeyOrder | None":
        """Returns the tokens of the keys that attention gets in the call of `ctx`; None if that is not known.

        A cache with a capacity has token `i` in slot `i`.
        """
        return None if self.capacity is None else KeyOrder(_count_keys(self.capacity, jnp.zeros_like(ctx.length)))


class SlotCache(LayerCache):
    """Base class of caches whose first array has a slot for each token, before the last axis; token `i` in slot `i`."""

    can_rewind: ClassVar[bool] = True

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return jax.tree.leaves(self)[0].shape[-2]


class KeyOrder(NamedTuple):
    """Tokens to which the keys of a cache belong.

    Args:
        index: `B S`, index of each key's token, in order; negative for slots before the first token. None if keys are
            in no order, and the one new token attends to those from the first to its last.
        has_gap: True if the first keys may belong to slots without a token.
    """

    index: Int[Array, "B S"] | None
    has_gap: bool = False


def layer_caches(layers: Any) -> list[Any]:
    """Lists the caches in the result of a stack's `init_cache`; arrays outside any `LayerCache` are listed
    themselves.
    """
    return jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, LayerCache))


def can_rewind(layers: Any) -> bool:
    """Returns True if every cache in `layers` can be rewound."""
    return all(isinstance(cache, LayerCache) and cache.can_rewind for cache in layer_caches(layers))


def make_rewindable(layers: Any, slots: int) -> Any:
    """Returns empty caches whose rings have extra slots, so that up to `slots` tokens can be rewound.

    Args:
        layers: Caches of layers, from `init_cache`.
        slots: Number of slots to add to each ring.
    """

    def widen(cache: Any) -> Any:
        if not isinstance(cache, RingCache):
            return cache
        # [..., K, W, H]; the leading axes are layers stored together, and rows.
        widths = [(0, 0)] * (cache.k.ndim - 2) + [(0, slots), (0, 0)]
        return RingCache(jnp.pad(cache.k, widths), jnp.pad(cache.v, widths), slots)

    return jax.tree.map(widen, layers, is_leaf=lambda x: isinstance(x, RingCache))


@pytree
class KVCache(SlotCache):
    """Cache of keys and values with `capacity` slots; token `i` is stored in slot `i`.

    Attributes:
        k: Keys, `B K S Hk`.
        v: Values, `B K S Hv`.
    """

    kind: ClassVar[str | None] = "full"

    k: Num[Array, "B K S Hk"]
    v: Num[Array, "B K S Hv"]

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        """Stores the new tokens of each row after its cached ones, and returns all slots to attend to.

        Tokens after the last slot are dropped, such as padding of the last chunk of a prompt.

        Raises:
            ValueError: when there are more new tokens than slots.
        """
        new_k, new_v = (put_rows(old, heads_first(x), ctx, axis=2) for old, x in ((self.k, k), (self.v, v)))
        return KVCache(new_k, new_v), heads_first(new_k), heads_first(new_v), k_start, k_end

    def unrolled(self, length: Int[Array, " B"]) -> Ordered:
        """Returns keys and values, and the offset from a token's index to its slot."""
        return heads_first(self.k), heads_first(self.v), jnp.zeros_like(length)


@pytree
class RingCache(LayerCache):
    """Cache of the last W keys and values, with W = `mask.ring + spare`; token `i` is stored in slot `i % W`.

    Attributes:
        k: Keys, `B K W Hk`.
        v: Values, `B K W Hv`.
        spare: Slots beyond those that the mask needs: the number of tokens that can be rewound (`make_rewindable`).
    """

    kind: ClassVar[str | None] = "ring"

    k: Num[Array, "B K W Hk"]
    v: Num[Array, "B K W Hv"]
    spare: int = static(default=0)

    @property
    def can_rewind(self) -> bool:
        """Returns True if there are spare slots."""
        return self.spare > 0

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        """Stores the new tokens, and returns the keys and values to attend to.

        For one token these are the ring itself: its order does not matter, because the token attends to all W slots or
        to a run of them. For several tokens, or with spare slots, they are the ring in order followed by the new
        tokens.
        """
        new = RingCache(self._put(self.k, k, ctx), self._put(self.v, v, ctx), self.spare)
        if k.shape[1] == 1 and not self.spare:
            return new, heads_first(new.k), heads_first(new.v), *self._slots(k_start, k_end)
        # With several tokens at once, the first ones still attend to entries that the last ones overwrite.
        # Token i is at W + i - length in the joined arrays, [B, W + T, K, H].
        old_k, old_v, shift = self.unrolled(ctx.length)
        keys, values = (jnp.concatenate([old, x.astype(old.dtype)], axis=1) for old, x in ((old_k, k), (old_v, v)))
        return new, keys, values, k_start + shift[:, None], k_end + shift[:, None]

    def key_order(self, ctx: Context) -> KeyOrder:
        """Returns the tokens of the keys of `extend`."""
        W, T = self.k.shape[2], ctx.index.shape[1]
        # The ring itself is in no order: until a window, or a chunk, is full, it fills the slots from 0.
        index = None if T == 1 and not self.spare else _count_keys(W + T, ctx.length - W)
        return KeyOrder(index, has_gap=True)

    def unrolled(self, length: Int[Array, " B"]) -> Ordered:
        """Returns keys and values from the oldest to the newest, which ends at `length`, and the offset from a token's
        index to its place among them.
        """
        return self._from_oldest(self.k, length), self._from_oldest(self.v, length), self.k.shape[2] - length

    def _put(self, ring: Array, new: Array, ctx: Context) -> Array:
        """Writes the last W real new tokens, of `B T K H`, into their slots."""
        B, W, T = ring.shape[0], ring.shape[2], new.shape[1]
        t = jnp.arange(T)[None, :]
        # Only the last W of more than W new tokens are stored, so each slot is written once.
        last = (t < ctx.num_new[:, None]) & (t >= ctx.num_new[:, None] - W)
        slot = jnp.where(last, (ctx.length[:, None] + t) % W, W)  # slot W does not exist: dropped
        return ring.at[jnp.arange(B)[:, None], :, slot].set(new.astype(ring.dtype), mode="drop", unique_indices=True)

    def _from_oldest(self, ring: Array, length: Int[Array, " B"]) -> Array:
        """Returns the ring from its oldest entry to its newest, ending at `length`, `B W K H`."""
        W = ring.shape[2]
        slot = (length[:, None] + jnp.arange(W)[None, :]) % W
        return heads_first(jnp.take_along_axis(ring, slot[:, None, :, None], axis=2))

    def _slots(self, k_start: Array, k_end: Array) -> tuple[Array, Array]:
        """Returns key intervals as slots of the ring, for a single query."""
        W, seen = self.k.shape[2], k_end - k_start
        # A full window is all W slots from 0. A shorter one does not wrap around the end.
        first = jnp.where(seen >= W, 0, k_start % W)
        return first, first + seen


@pytree
class QuantizedCache(LayerCache):
    """Cache that stores keys and values rounded to int8 or float8, with a scale per token and head.

    Args:
        values: Rounded keys and values.
        scales: Cache of the same kind in float32, with heads of width 1.
    """

    values: KVCache | RingCache
    scales: KVCache | RingCache

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens that a row can hold; None without a limit."""
        return self.values.capacity

    @property
    def can_rewind(self) -> bool:
        """Returns True if the cache of the rounded values can be rewound."""
        return self.values.can_rewind

    def key_order(self, ctx: Context) -> KeyOrder | None:
        """Returns the tokens of the keys, as the cache of the rounded values does."""
        return self.values.key_order(ctx)

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        """Stores the rounded new tokens, and returns keys and values multiplied by their scales."""
        # channelwise_axes 0 to 2: one scale for each [B, T, K], shared by the width of the head.
        qk, qv = (qwix.quantize(x.astype(jnp.float32), self.values.k.dtype, channelwise_axes=range(3)) for x in (k, v))
        values, *stored, start, end = self.values.extend(qk.qvalue, qv.qvalue, ctx, k_start, k_end)
        scales, *factors, _, _ = self.scales.extend(qk.scale, qv.scale, ctx, k_start, k_end)
        assert not isinstance(values, QuantizedCache) and not isinstance(scales, QuantizedCache)
        # [B, S, K, H] * [B, S, K, 1], in float32
        keys, vals = ((q.astype(jnp.float32) * s).astype(k.dtype) for q, s in zip(stored, factors, strict=True))
        return QuantizedCache(values, scales), keys, vals, start, end

    def unrolled(self, length: Int[Array, " B"]) -> Ordered:
        """Returns keys and values multiplied by their scales, in float32, and the offset from a token's index to its
        place among them.
        """
        *stored, shift = self.values.unrolled(length)
        *factors, _ = self.scales.unrolled(length)
        keys, vals = (q.astype(jnp.float32) * s for q, s in zip(stored, factors, strict=True))
        return keys, vals, shift


@pytree
class LatentCache(SlotCache):
    """Cache of each token's normed latent followed by its rotated key part: `kv_rank + rope.dim` numbers for all
    heads.
    """

    kind: ClassVar[str | None] = "latent"

    latent: Float[Array, "B S R"]

    def extend(self, latent: Array, ctx: Context) -> "LatentCache":
        """Stores the latents of the new tokens."""
        return LatentCache(put_rows(self.latent, latent, ctx))


@pytree
class QuantizedLatentCache(SlotCache):
    """A `LatentCache` that stores latents rounded to int8 or float8.

    Args:
        values: Rounded latents.
        scales: One scale for each token's latent and one for its key part, because their magnitudes differ.
        kv_rank: Numbers in the latent; the rest is the key part.
    """

    values: Num[Array, "B S R"]
    scales: Float[Array, "B S 2"]
    kv_rank: int = static()

    def extend(self, latent: Array, ctx: Context) -> "QuantizedLatentCache":
        """Stores the rounded latents of the new tokens."""
        # [B, T, R] -> [B, T, kv_rank] and [B, T, R - kv_rank], with one scale per token each.
        parts = jnp.split(latent.astype(jnp.float32), [self.kv_rank], axis=-1)
        low, key = (qwix.quantize(x, self.values.dtype, channelwise_axes=(0, 1)) for x in parts)
        # [B, T, R] and [B, T, 2]
        values = jnp.concatenate([low.qvalue, key.qvalue], axis=-1)
        scales = jnp.concatenate([low.scale, key.scale], axis=-1)
        return QuantizedLatentCache(
            put_rows(self.values, values, ctx), put_rows(self.scales, scales, ctx), self.kv_rank
        )

    @property
    def latent(self) -> Float[Array, "B S R"]:
        """Returns the latents multiplied by their scales, in float32."""
        sizes = jnp.array([self.kv_rank, self.values.shape[-1] - self.kv_rank])
        # [B, S, 2] -> [B, S, R]
        scales = jnp.repeat(self.scales, sizes, axis=-1, total_repeat_length=self.values.shape[-1])
        return self.values.astype(jnp.float32) * scales


def _count_keys(keys: int, first: Int[Array, " B"]) -> Int[Array, "B S"]:
    """Counts the keys of each row from the index of its first one."""
    return first[:, None] + jnp.arange(keys, dtype=jnp.int32)[None]


def heads_first(x: Num[Array, "B S K H"]) -> Num[Array, "B K S H"]:
    """Swaps tokens and heads: the order of keys in a cache from that in a layer, and back."""
    return jnp.swapaxes(x, 1, 2)


def put_rows(old: Array, new: Array, ctx: Context, *, axis: int = 1) -> Array:
    """Writes the new tokens of each row after its cached ones, and drops those after the last slot.

    Args:
        old: The cached tokens, with S slots along `axis`.
        new: The T new tokens along `axis`; the other axes are those of `old`.
        ctx: The context of the call.
        axis: Axis of tokens: 1, or 2 behind the heads.

    Raises:
        ValueError: when there are more new tokens than slots.
    """
    S, T, axis_of_row = old.shape[axis], new.shape[axis], axis - 1
    if T > S:
        raise ValueError(f"{T} new tokens do not fit a cache of capacity {S}; make a larger one")

    if is_known(ctx.length) and not np.asarray(ctx.length).any():  # an empty cache: prompts are written to its start
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), 0, axis=axis)

    def put(old: Array, new: Array, length: Array) -> Array:
        if T == 1:  # decoding: one scatter, which drops out-of-range tokens
            return old.at[(*[slice(None)] * axis_of_row, length)].set(new.squeeze(axis_of_row), mode="drop")
        # [S, ...] or [K, S, ...], updated by a window of T tokens of one row. XLA clamps a window that would end after
        # S to start at S - T, which would overwrite older tokens. So write the window there, with the older tokens in
        # front of the new ones: slot start + t keeps its value for t < over, and gets token t - over otherwise.
        start = jnp.minimum(length, S - T)
        over = length - start
        held = jax.lax.dynamic_slice_in_dim(old, start, T, axis=axis_of_row)
        is_older = (jnp.arange(T) < over).reshape(T, *[1] * (new.ndim - axis))
        return jax.lax.dynamic_update_slice_in_dim(
            old, jnp.where(is_older, held, jnp.roll(new, over, axis=axis_of_row)), start, axis=axis_of_row
        )

    return jax.vmap(put)(old, new.astype(old.dtype), ctx.length)


AttentionCache = KVCache | RingCache | QuantizedCache


@pytree
class SharedKV:
    """Keys and values of one layer, for later layers without keys and values of their own.

    With a cache they are its whole contents, in its order, so one cache serves all these layers.

    Args:
        k: Keys, `B S K Hk`, normed and rotated.
        v: Values, `B S K Hv`.
        k_start: First key of each query, `B T`, as an index into `k`.
        k_end: One past the last key of each query, `B T`.
        segment_ids: As in a `MaskHint`.
        static_mask: Static description of the mask; None if there is none.
    """

    k: Num[Array, "B S K Hk"]
    v: Num[Array, "B S K Hv"]
    k_start: Int[Array, "B T"]
    k_end: Int[Array, "B T"]
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    static_mask: StaticMask | None = static(default=None)

    @property
    def mask_hint(self) -> MaskHint | None:
        """Returns the description of the mask for `attend`."""
        return None if self.static_mask is None else MaskHint(self.static_mask, self.segment_ids)


def kv_cache(
    batch: int, capacity: int, *, num_kv_heads: int, k_dim: int, v_dim: int, ring: int | None, dtype: Any
) -> AttentionCache:
    """Makes an empty cache of keys and values: a ring if it is smaller than `capacity`, else one slot per token.

    Args:
        batch: Number B of rows.
        capacity: Maximum number of tokens in a row.
        num_kv_heads: Number K of key heads.
        k_dim: Width of a key.
        v_dim: Width of a value.
        ring: Slots that the mask needs (`mask.ring`); None if it needs all tokens.
        dtype: Dtype of the stored values; int8 and float8 are quantized.

    Raises:
        ValueError: when `dtype` is an integer other than int8.
    """
    kind, slots = (RingCache, ring) if ring is not None and ring < capacity else (KVCache, capacity)

    def zeros(k_dim: int, v_dim: int, dtype: Any) -> KVCache | RingCache:
        shape = (batch, num_kv_heads, slots)
        return kind(jnp.zeros((*shape, k_dim), dtype), jnp.zeros((*shape, v_dim), dtype))

    # Scales are a cache with heads of width 1, so that both are indexed in the same way.
    values = zeros(k_dim, v_dim, dtype)
    return QuantizedCache(values, zeros(1, 1, jnp.float32)) if is_quantized(dtype) else values


def is_quantized(dtype: Any) -> bool:
    """Returns True if a cache of `dtype` needs scales; raises ValueError for integers other than int8."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype) != jnp.int8:
        raise ValueError(f"the dtype of a cache must be floating or int8, got {jnp.dtype(dtype).name}")
    return jnp.dtype(dtype).itemsize == 1
