"""What layers keep of the tokens so far: immutable values, handed in and handed back.

A layer's cache is any pytree whose arrays begin with the axis of rows. A class derived from `LayerCache` says whether
it can be rewound and what tables call it; anything else is taken for a state that cannot be rewound.

A cache of keys and values decides where keys lie. `extend` stores the new ones and returns the arrays to attend to,
with key intervals on *those* arrays. Rows may have different lengths: `ctx.length` counts each row's cached tokens,
`ctx.num_new` how many of the new ones are real (they come first; what follows is padding).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float, Int, Num

from maxlib.nn._context import Context
from maxlib.nn._pytree import pytree, static

Extended = tuple["AttentionCache", Array, Array, Array, Array]


@pytree
class Cache:
    """A model's whole cache: what each layer keeps, and what all of them share.

    Args:
        layers: What `Stack.init_cache` made.
        length: `B`, tokens cached so far in each row.
        rope_length: A fixed length for rotary scalings that depend on it (dynamic NTK, LongRoPE); None for that of
            each row so far, by which transformers rotates new tokens.
        position_offset: `B`, by how much positions run ahead of (or behind) the number of tokens, as after an image
            whose positions are those of a grid; None if they never do.
    """

    layers: Any
    length: Int[Array, " B"]
    rope_length: int | None = static(default=None)
    position_offset: Int[Array, " B"] | None = None

    def advanced(self, layers: Any, ctx: Context) -> "Cache":
        """Returns the cache after a forward pass."""
        return Cache(layers, self.length + ctx.num_new, self.rope_length, ctx.next_position_offset)


class LayerCache:
    """Base of what one layer keeps: a pytree (`nn.pytree`) whose arrays begin with the axis of rows.

    Attributes:
        can_rewind: True if tokens are forgotten by making `ctx.length` smaller, since what lies behind it is written
            anew before it is read. Speculative decoding needs that to take back a refused draft.
        kind: What tables call it; None means the name of the class.
    """

    can_rewind: ClassVar[bool] = False
    kind: ClassVar[str | None] = None


def layer_caches(layers: Any) -> list[Any]:
    """Lists the caches in what a stack's `init_cache` made; arrays outside any `LayerCache` are listed as they are."""
    return jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, LayerCache))


def can_rewind(layers: Any) -> bool:
    """Tells whether every cache in `layers` says that it can be rewound."""
    return all(isinstance(one, LayerCache) and one.can_rewind for one in layer_caches(layers))


@pytree
class KVCache(LayerCache):
    """Keys and values by token index, `capacity` slots."""

    can_rewind: ClassVar[bool] = True
    kind: ClassVar[str | None] = "full"

    k: Num[Array, "B S K Hk"]
    v: Num[Array, "B S K Hv"]

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        if k.shape[1] > self.k.shape[1]:
            raise ValueError(
                f"{k.shape[1]} new tokens do not fit a cache of capacity {self.k.shape[1]}; make a larger one"
            )
        put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0))
        new_k = put(self.k, k.astype(self.k.dtype), ctx.length)
        new_v = put(self.v, v.astype(self.v.dtype), ctx.length)
        return KVCache(new_k, new_v), new_k, new_v, k_start, k_end


@pytree
class RingCache(LayerCache):
    """The last W keys and values; token `i` lies in slot `i % W`, W being `mask.ring`."""

    kind: ClassVar[str | None] = "ring"

    k: Num[Array, "B W K Hk"]
    v: Num[Array, "B W K Hv"]

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        new = RingCache(self._put(self.k, k, ctx), self._put(self.v, v, ctx))
        if k.shape[1] == 1:
            return new, new.k, new.v, *self._slots(k_start, k_end)
        # Several tokens at once: the first of them still see entries that the last ones overwrite.
        shift = (self.k.shape[1] - ctx.length)[:, None]
        keys, values = (jnp.concatenate([self._in_order(old, ctx), x.astype(old.dtype)], axis=1)
                        for old, x in ((self.k, k), (self.v, v)))  # fmt: skip
        return new, keys, values, k_start + shift, k_end + shift

    def _put(self, ring: Array, new: Array, ctx: Context) -> Array:
        B, W, T = ring.shape[0], ring.shape[1], new.shape[1]
        t = jnp.arange(T)[None, :]
        last = (t < ctx.num_new[:, None]) & (t >= ctx.num_new[:, None] - W)
        slot = jnp.where(last, (ctx.length[:, None] + t) % W, W)  # slot W does not exist: dropped
        return ring.at[jnp.arange(B)[:, None], slot].set(new.astype(ring.dtype), mode="drop", unique_indices=True)

    def _in_order(self, ring: Array, ctx: Context) -> Array:
        """The ring from its oldest entry to its newest, ending at `ctx.length`."""
        W = ring.shape[1]
        slot = (ctx.length[:, None] + jnp.arange(W)[None, :]) % W
        return jnp.take_along_axis(ring, slot[:, :, None, None], axis=1)

    def _slots(self, k_start: Array, k_end: Array) -> tuple[Array, Array]:
        W, seen = self.k.shape[1], k_end - k_start
        first = jnp.where(seen >= W, 0, k_start % W)
        return first, first + seen


@pytree
class QuantizedCache(LayerCache):
    """Keys and values rounded to int8 or a float8 when they come, each token's head with a scale of its own.

    Args:
        values: Rounded keys and values.
        scales: A cache of the same kind in float32, with heads of size 1.
    """

    values: KVCache | RingCache
    scales: KVCache | RingCache

    @property
    def can_rewind(self) -> bool:
        return self.values.can_rewind

    def extend(self, k: Array, v: Array, ctx: Context, k_start: Array, k_end: Array) -> Extended:
        qk, qv = (qwix.quantize(x.astype(jnp.float32), self.values.k.dtype, channelwise_axes=range(3)) for x in (k, v))
        values, *whole, start, end = self.values.extend(qk.qvalue, qv.qvalue, ctx, k_start, k_end)
        scales, *factors, _, _ = self.scales.extend(qk.scale, qv.scale, ctx, k_start, k_end)
        assert not isinstance(values, QuantizedCache) and not isinstance(scales, QuantizedCache)
        keys, vals = ((q.astype(jnp.float32) * s).astype(k.dtype) for q, s in zip(whole, factors, strict=True))
        return QuantizedCache(values, scales), keys, vals, start, end


@pytree
class LatentCache(LayerCache):
    """The normed latent of each token beside its rotated key part: `kv_rank + rope.dim` numbers, whatever the heads."""

    can_rewind: ClassVar[bool] = True
    kind: ClassVar[str | None] = "latent"

    latent: Float[Array, "B S R"]

    def extend(self, latent: Array, ctx: Context) -> "LatentCache":
        return LatentCache(_put_rows(self.latent, latent, ctx))


@pytree
class QuantizedLatentCache(LayerCache):
    """A `LatentCache` rounded to int8 or a float8 when tokens come.

    Args:
        values: Rounded latents.
        scales: One for each token's latent and one for its key part, which differ in size.
        kv_rank: Numbers in the latent; the rest is the key part.
    """

    can_rewind: ClassVar[bool] = True
    values: Num[Array, "B S R"]
    scales: Float[Array, "B S 2"]
    kv_rank: int = static()

    def extend(self, latent: Array, ctx: Context) -> "QuantizedLatentCache":
        parts = jnp.split(latent.astype(jnp.float32), [self.kv_rank], axis=-1)
        low = [qwix.quantize(x, self.values.dtype, channelwise_axes=(0, 1)) for x in parts]
        values, scales = (
            jnp.concatenate(both, axis=-1) for both in zip(*((q.qvalue, q.scale) for q in low), strict=True)
        )
        return QuantizedLatentCache(
            _put_rows(self.values, values, ctx), _put_rows(self.scales, scales, ctx), self.kv_rank
        )

    @property
    def latent(self) -> Float[Array, "B S R"]:
        sizes = jnp.array([self.kv_rank, self.values.shape[-1] - self.kv_rank])
        scales = jnp.repeat(self.scales, sizes, axis=-1, total_repeat_length=self.values.shape[-1])
        return self.values.astype(jnp.float32) * scales


def _put_rows(old: Num[Array, "B S R"], new: Num[Array, "B T R"], ctx: Context) -> Num[Array, "B S R"]:
    if new.shape[1] > old.shape[1]:
        raise ValueError(f"{new.shape[1]} new tokens do not fit a cache of capacity {old.shape[1]}; make a larger one")
    put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0))
    return put(old, new.astype(old.dtype), ctx.length)


AttentionCache = KVCache | RingCache | QuantizedCache


def kv_cache(
    batch: int, capacity: int, *, num_kv_heads: int, k_dim: int, v_dim: int, ring: int | None, dtype: Any
) -> AttentionCache:
    """Makes an empty cache: a ring of `ring` slots where that is less than `capacity`, else a full one.

    int8 and float8 are quantized. Raises ValueError for other integers, which keys do not fit in.
    """
    kind, slots = (RingCache, ring) if ring is not None and ring < capacity else (KVCache, capacity)

    def zeros(k_dim: int, v_dim: int, dtype: Any) -> KVCache | RingCache:
        empty = lambda dim: jnp.zeros((batch, slots, num_kv_heads, dim), dtype)
        return kind(empty(k_dim), empty(v_dim))

    values = zeros(k_dim, v_dim, dtype)
    return QuantizedCache(values, zeros(1, 1, jnp.float32)) if is_quantized(dtype) else values


def is_quantized(dtype: Any) -> bool:
    """Tells whether a cache of `dtype` needs scales. Raises ValueError for integers other than int8."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype) != jnp.int8:
        raise ValueError(f"a cache is of a floating dtype or int8, got {jnp.dtype(dtype).name}")
    return jnp.dtype(dtype).itemsize == 1
