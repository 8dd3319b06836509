"""Cross-attention: keys and values come from another sequence, such as an encoder's output (Vaswani et al. 2017,
arXiv:1706.03762).

Shapes: B rows, T new tokens, S vectors of the other sequence, D width, N query heads, K key heads, H head dimension.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.attention._grouped_query import attend, attention_kind
from maxlib.nn.cache import LayerCache, heads_first
from maxlib.nn.decoder._context import Context, context_of, first_of_segment
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.remat import mark_heads
from maxlib.ops import MaskHint, StaticMask
from maxlib.sharding import constrain


@pytree
class CrossCache(LayerCache):
    """Keys and values of the other sequence, computed once. It is empty, `S = 0`, before the first call.

    Args:
        k: Keys, `B K S H`.
        v: Values, `B K S H`.
        start: Index of each row's first vector that is not padding.
        stop: One past its last.
    """

    can_rewind: ClassVar[bool] = True  # decoding does not change it
    kind: ClassVar[str | None] = "cross"

    k: Num[Array, "B K S H"]
    v: Num[Array, "B K S H"]
    start: Int[Array, " B"]
    stop: Int[Array, " B"]


class CrossAttention(SequenceMixer):
    """Attention of a decoder's tokens to the output of an encoder, `ctx.encoded`.

    A token attends to the vectors of its own document: both sides may be packed or padded. With a cache, the first call
    stores the keys and values of the encoder's output, and later calls need only the cache.

        cross = nn.CrossAttention(64, num_heads=4, head_dim=16, rngs=nnx.Rngs(0))
        ctx = nn.make_context(2, 8, encoded=nn.Encoded(jnp.ones((2, 5, 64))))
        y, _ = cross(jnp.ones((2, 8, 64)), ctx)  # B T D

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of query heads.
        head_dim: Width H of a head.
        num_kv_heads: Number K of key and value heads, which divides N; None means N.
        source_dim: Width of the encoder's output; None means D.
        bias: True adds biases to the query, key and value projections.
        out_bias: True adds a bias to the output projection.
        q_norm: Norm over the head dimension of queries; None for none.
        k_norm: Norm over the head dimension of keys; None for none.
        scale: Factor on the scores, by default `head_dim ** -0.5`.
        softcap: `c` in `c * tanh(scores / c)`; None leaves scores as they are.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        ValueError: when `num_heads` is not a positive multiple of `num_kv_heads`.
    """

    op: ClassVar[str | None] = "attention"
    # Zigzag order would also reorder the other sequence, whose length differs.
    reorderable: ClassVar[bool] = False
    takes_position_bias: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        source_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        q_norm: Callable | None = None,
        k_norm: Callable | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, H = dim, num_heads, head_dim
        K, E = N if num_kv_heads is None else num_kv_heads, D if source_dim is None else source_dim
        if N < 1 or K < 1 or N % K:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, and both at least 1; got {N} and {K}")
        keys = (K, H, E), ("kv_heads", "head_dim", "embed")
        self.q = Einsum("...D,NHD->...NH", (N, H, D), ("heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.k = Einsum("...D,KHD->...KH", *keys, bias=bias, rngs=rngs)
        self.v = Einsum("...D,KHD->...KH", *keys, bias=bias, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, H), ("embed", "heads", "head_dim"), bias=out_bias, rngs=rngs)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.scale, self.softcap, self.implementation = scale, softcap, implementation
        self.num_heads, self.num_kv_heads, self.head_dim, self.source_dim = N, K, H, E

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: CrossCache | None = None
    ) -> tuple[Float[Array, "B T D"], CrossCache | None]:
        """Attends to the encoder's output.

        Args:
            x: Input, `B T D`.
            ctx: Context with `encoded`, unless the cache has its keys and values.
            cache: Cache from `init_cache` or of an earlier call, or None.

        Returns:
            The output, `B T D`, and the cache (None without one).

        Raises:
            ValueError: when there is no output of an encoder, or its width is not `source_dim`.
        """
        ctx = context_of(x, ctx)
        q = constrain(self.q(x), "batch", "seq", "act_heads", None)  # [B, T, D] -> [B, T, N, H]
        q = q if self.q_norm is None else self.q_norm(q)
        if ctx.encoded is None:
            k, v, k_start, k_end, mask_hint = self._cached(cache, x.shape[1])
        else:
            k, v, k_start, k_end, mask_hint = self._keys_and_values(ctx)
            cache = None if cache is None else _filled(cache, k, v, ctx)
        out = attend(
            mark_heads(q, "q"),
            k,
            v,
            k_start,
            k_end,
            mask_hint=mask_hint,
            scale=self.scale,
            softcap=self.softcap,
            implementation=self.implementation,
        )
        return self.o(checkpoint_name(out, "cross_heads")), cache  # [B, T, N, H] -> [B, T, D]

    def _cached(self, cache: CrossCache | None, length: int) -> tuple[Array, Array, Array, Array, None]:
        """Returns keys, values, the interval of each of `length` tokens, and no hint.

        Raises:
            ValueError: when there is no cache, or it is empty.
        """
        if cache is None or not cache.k.shape[2]:
            raise ValueError(
                "cross-attention needs the output of an encoder, but this call has none: call the model with its "
                "encoder's input (source=, or audio= for sound), a layer with nn.make_context(..., encoded=nn.Encoded(x)), "
                "or decode with a cache whose first call had it"
            )
        start, stop = (jnp.broadcast_to(bound[:, None], (len(bound), length)) for bound in (cache.start, cache.stop))
        return heads_first(cache.k), heads_first(cache.v), start, stop, None

    def _keys_and_values(self, ctx: Context) -> tuple[Array, Array, Array, Array, MaskHint]:
        """Returns keys, values, the interval of each token, and the description of these intervals."""
        assert ctx.encoded is not None and ctx.encoded_interval is not None
        hidden, ids = ctx.encoded.hidden, ctx.encoded.segment_ids
        if hidden.shape[2] != self.source_dim:
            raise ValueError(
                f"the encoder's output must have the width source_dim={self.source_dim}, got {hidden.shape[2]}"
            )
        k = constrain(self.k(hidden), "batch", "seq", "act_heads", None)  # [B, S, D] -> [B, S, K, H]
        v = constrain(self.v(hidden), "batch", "seq", "act_heads", None)
        k = k if self.k_norm is None else self.k_norm(k)
        k_start, k_end = ctx.encoded_interval
        if ids is None and not ctx.packed:
            return mark_heads(k, "k"), mark_heads(v, "v"), k_start, k_end, MaskHint(StaticMask("full"))
        # A document is numbered by its first vector; padding has numbers of its own on both sides.
        ids = jnp.ones(hidden.shape[:2], jnp.int32) if ids is None else ids
        of_keys = jnp.where(ids > 0, first_of_segment(ids), -1)
        of_queries = jnp.where(k_start < k_end, k_start, -2)
        hint = MaskHint(StaticMask("full", segmented=True), (of_queries, of_keys))
        return mark_heads(k, "k"), mark_heads(v, "v"), k_start, k_end, hint

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> CrossCache:
        """Makes an empty cache, which the first call fills; `capacity`, of the decoder's tokens, does not matter."""
        # Arrays of their own, as a donated cache may not have one twice.
        k, v = (jnp.zeros((batch, self.num_kv_heads, 0, self.head_dim), dtype) for _ in range(2))
        return CrossCache(k, v, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that attention sends in a training step, as if both sequences were equally long."""
        return split.attention(queries=2 * self.num_heads * self.head_dim, keys=2 * self.num_kv_heads * self.head_dim)

    @property
    def kind(self) -> str:
        """Names the kind in tables, such as "cross MHA"."""
        return f"cross {attention_kind(self.num_heads, self.num_kv_heads)}"


def _filled(cache: CrossCache, k: Array, v: Array, ctx: Context) -> CrossCache:
    """Returns a cache of these keys and values, in the dtype of `cache`."""
    assert ctx.encoded is not None
    size = k.shape[1]
    ids = ctx.encoded.segment_ids
    is_real = jnp.ones(k.shape[:2], bool) if ids is None else ids > 0
    start = jnp.argmax(is_real, axis=1).astype(jnp.int32)
    stop = jnp.where(is_real.any(axis=1), size - jnp.argmax(is_real[:, ::-1], axis=1), 0).astype(jnp.int32)
    k, v = heads_first(k.astype(cache.k.dtype)), heads_first(v.astype(cache.v.dtype))
    return CrossCache(k, v, start, stop)
