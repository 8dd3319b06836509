"""Grouped-query attention (Ainslie et al. 2023), of which multi-head and multi-query attention are the ends."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import ops
from maxlib.nn._context import Context, context
from maxlib.nn._linear import Einsum
from maxlib.nn.cache import AttentionCache, kv_cache
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic, attention_traffic
from maxlib.nn.remat import mark_heads
from maxlib.ops._attention import Causal, Mask
from maxlib.ops._grid_rope import GridRope
from maxlib.ops._rope import Rope, apply_rope
from maxlib.sharding import constrain, shard_map_by_name
from maxlib.sharding.layers import axis_of, axis_size, mesh_axes, natural_order


@dataclasses.dataclass(frozen=True)
class TemperatureTuning:
    """`1 + scale * log(1 + floor((index + 1) / floor))`: queries sharpen with what they see (Nakanishi 2025,
    arXiv:2501.19399).

    In Llama 4's form, in steps of `floor` tokens, for layers that no position rotates.
    """

    floor: float
    scale: float

    def __call__(self, index: Int[Array, "B T"]) -> Float[Array, "B T"]:
        steps = jnp.floor((index.astype(jnp.float32) + 1) / self.floor)
        return 1 + self.scale * jnp.log1p(steps)


class Attention(SequenceMixer):
    """Grouped-query attention: queries of `num_heads` attend to `num_kv_heads` keys and values under `mask`.

    rope: how positions rotate queries and keys; None leaves them (NoPE). q_norm, k_norm: norms over the head dimension,
    applied before the rotation. scale: factor on the scores, by default `head_dim ** -0.5`. softcap: `c * tanh(scores /
    c)`. sinks: one learned logit per head that takes part in the softmax and has no value (GPT-OSS). temperature:
    factor on each query, given its index in its document (`TemperatureTuning`). implementation: of `ops.attention`,
    None for the best one; `with_attention` sets it in a whole model. Raises ValueError when `num_heads` is no positive
    multiple of `num_kv_heads`.
    """

    op: ClassVar[str | None] = "attention"
    reorderable: ClassVar[bool] = True
    quantizable_cache: ClassVar[bool] = True
    probes_scores: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        mask: Mask = Causal(),
        rope: Rope | GridRope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        q_norm: Callable | None = None,
        k_norm: Callable | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        temperature: Callable[[Array], Array] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, K, H = dim, num_heads, num_kv_heads or num_heads, head_dim
        if N < 1 or K < 1 or N % K:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {N} and {K}")
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask must be a mask of maxlib.ops, such as Causal() & SlidingWindow(8), got {type(mask).__name__} {mask!r:.40}; "
                "arrays of booleans have no place in it"
            )
        if not isinstance(rope, Rope | GridRope | None):
            raise TypeError(
                f"rope must be an ops.Rope, such as Rope(head_dim), or None; got {type(rope).__name__} {rope!r:.40}"
            )
        if rope is not None and rope.dim > H:
            raise ValueError(f"the rotary dimensions ({rope.dim}) must not exceed head_dim ({H})")
        self.q = Einsum("...D,NHD->...NH", (N, H, D), ("heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.k = Einsum("...D,KHD->...KH", (K, H, D), ("kv_heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.v = Einsum("...D,KHD->...KH", (K, H, D), ("kv_heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, H), ("embed", "heads", "head_dim"), bias=out_bias, rngs=rngs)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = nnx.Param(jnp.zeros(N), axes=("heads",)) if sinks else None
        self.mask, self.rope, self.scale, self.softcap = mask, rope, scale, softcap
        self.temperature, self.implementation = temperature, implementation
        self.num_heads, self.num_kv_heads, self.head_dim = N, K, H

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: AttentionCache | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionCache | None]:
        """Mixes the tokens of each document. Without `ctx` each row is one document from position 0."""
        ctx = context(*x.shape[:2]) if ctx is None else ctx
        q, k, v = map(mark_heads, self.project(x, ctx), ("q", "k", "v"))
        k_start, k_end = ctx.bounds(self.mask)
        if cache is not None:
            cache, k, v, k_start, k_end = cache.extend(k, v, ctx, k_start, k_end)
        sinks = None if self.sinks is None else self.sinks[...]
        options = {"scale": self.scale, "softcap": self.softcap, "implementation": self.implementation}
        out = attend(q, k, v, k_start, k_end, sinks, zigzag=ctx.zigzag, **options)
        return self.o(out), cache

    def project(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array, Array]:
        """Queries, keys and values, normed, sharpened and rotated."""
        q = constrain(self.q(x), "batch", "seq", "act_heads", None)
        k = constrain(self.k(x), "batch", "seq", "act_heads", None)
        v = constrain(self.v(x), "batch", "seq", "act_heads", None)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if self.temperature is not None:
            q = (q * self.temperature(ctx.index - ctx.start)[:, :, None, None]).astype(q.dtype)
        if (rope := self.rope) is None:
            return q, k, v
        cos, sin = ctx.rotary(rope)
        return (
            apply_rope(q, cos, sin, interleaved=rope.interleaved),
            apply_rope(k, cos, sin, interleaved=rope.interleaved),
            v,
        )

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> AttentionCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens; windows need only a ring."""
        return kv_cache(
            batch,
            capacity,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            ring=self.mask.ring,
            dtype=dtype,
        )

    def traffic(self, split: SplitSequence) -> Traffic:
        return attention_traffic(
            split, queries=2 * self.num_heads * self.head_dim, keys=2 * self.num_kv_heads * self.head_dim
        )

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        return self.project(x, ctx)[:2]

    @property
    def kind(self) -> str:
        return attention_kind(self.num_heads, self.num_kv_heads)

    def features(self) -> Iterator[str]:
        found = {
            "partial RoPE": self.rope is not None and self.rope.dim < self.head_dim,
            "layers without positions": self.rope is None,
            "qk-norm": self.q_norm is not None,
            "temperature tuning": self.temperature is not None,
            "attention soft-cap": self.softcap is not None,
            "sinks": self.sinks is not None,
        }
        yield from (word for word, has in found.items() if has)


def attention_kind(num_heads: int, num_kv_heads: int) -> str:
    """Names attention by its key heads: MHA (as many as queries), MQA (one) or GQA."""
    return "MHA" if num_heads == num_kv_heads else "MQA" if num_kv_heads == 1 else "GQA"


def attend(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    k_start,
    k_end,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
    zigzag: bool = False,
) -> Float[Array, "B T N Hv"]:
    """`ops.attention` on each device's own rows, heads and queries, by the layout in use.

    They decide by the axes `q_seq` and `kv_seq` how a split sequence comes together. Only `q_seq` is split: keys are
    gathered. Both are split: keys travel around a ring. Neither is: heads are split instead (`attn_heads`), and
    all-to-alls exchange the two (Ulysses). zigzag: tokens stand in the order of `sharding.layers.zigzag`. Raises
    ValueError for heads that cannot be split where tokens are to be exchanged for them.
    """
    ring = axis_of("kv_seq") if k.shape[1] % axis_size("kv_seq") == 0 else None
    parts = axis_size("q_seq") if zigzag else 1

    def op(q, k, v, k_start, k_end, sinks):
        bounds = {"k_start": k_start, "k_end": k_end}
        options = {**bounds, "sinks": sinks, "scale": scale, "softcap": softcap, "implementation": implementation}
        if ring is not None:
            return ops.ring_attention(q, k, v, axis_name=ring, pieces=2 if zigzag else 1, **options)
        k, v = (natural_order(x, parts) for x in (k, v)) if zigzag else (k, v)
        return ops.attention(q, k, v, **options)

    # Tokens are exchanged for heads here and nowhere else: left alone, XLA would rotate and project heads, and gather
    # tokens.
    own = lambda x: constrain(x, "batch", "seq", "act_heads", None)
    q, k, v = (own(x) for x in (q, k, v)) if q.shape[1] == k.shape[1] else (q, k, v)
    copies = axis_size("attn_heads")
    if q.shape[2] % copies == 0 and copies > k.shape[2] and copies % k.shape[2] == 0:
        # Fewer key heads than devices: each takes a copy of its own.
        k, v = (jnp.repeat(x, copies // x.shape[2], axis=2) for x in (k, v))
    _check_exchange(q, k)
    queries, keys = ("batch", "q_seq", "attn_heads", None), ("batch", "kv_seq", "attn_heads", None)
    names = [queries, keys, keys, queries[:2], queries[:2], ("attn_heads",)]
    return own(shard_map_by_name(op, names, queries)(q, k, v, k_start, k_end, sinks))


def _check_exchange(q: Array, k: Array) -> None:
    """Raises ValueError where tokens cannot be exchanged for heads: each device would gather all of both.

    A token at decoding is not split.
    """
    exchanged = {*mesh_axes("seq")} & {*mesh_axes("attn_heads")} - {*mesh_axes("act_heads")}  # `SP` exchanges nothing
    parts, heads = axis_size("attn_heads"), (q.shape[2], k.shape[2])
    if exchanged and q.shape[1] % axis_size("seq") == 0 and any(count % parts for count in heads):
        raise ValueError(
            f"the rule attn_heads exchanges tokens for heads over {mesh_axes('attn_heads')} of the mesh, {parts} devices, which "
            f"must divide the query heads, and divide or be a multiple of the key heads; got {heads[0]} and {heads[1]}. Take "
            "fewer devices for it, or sharding.CP_RING or CP_GATHER"
        )
