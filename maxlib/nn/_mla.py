"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values grow out of one small latent."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._attention import attend
from maxlib.nn._context import Context, context
from maxlib.nn._linear import Einsum
from maxlib.nn._norm import RMSNorm
from maxlib.nn.cache import LatentCache, QuantizedLatentCache, is_quantized
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic, attention_traffic
from maxlib.nn.remat import mark_heads
from maxlib.ops._attention import Causal, Mask
from maxlib.ops._rope import Rope, apply_rope
from maxlib.sharding import constrain


class MLA(SequenceMixer):
    """Multi-head latent attention: keys and values grow out of one small latent of each token.

    Each head's key is `nope_dim` numbers from the latent and `rope.dim` rotated ones that all heads share.

    kv_rank: size of the latent. q_rank: size of the queries' own latent; None projects them directly. scale: factor on
    the scores, `(nope_dim + rope.dim) ** -0.5` by default (YaRN models multiply it by the square of their mscale).
    implementation: of `ops.attention`, None for the best one; a single new token against a cached latent is attention
    of another shape, which always gets the best one.
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
        kv_rank: int,
        nope_dim: int,
        v_dim: int,
        rope: Rope,
        q_rank: int | None = None,
        mask: Mask = Causal(),
        scale: float | None = None,
        norm_eps: float = 1e-6,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, R, H = dim, num_heads, kv_rank, nope_dim + rope.dim
        wide, heads = ("heads", "head_dim", "embed"), ("heads", "head_dim", "rank")
        if q_rank is None:
            self.q_down, self.q_norm = None, None
            self.q_up = Einsum("...D,NHD->...NH", (N, H, D), wide, rngs=rngs)
        else:
            self.q_down = Einsum("...D,RD->...R", (q_rank, D), ("rank", "embed"), gather_once=True, rngs=rngs)
            self.q_norm = RMSNorm(q_rank, eps=norm_eps)
            self.q_up = Einsum("...R,NHR->...NH", (N, H, q_rank), heads, gather_once=True, rngs=rngs)
        self.kv_down = Einsum("...D,RD->...R", (R + rope.dim, D), ("rank", "embed"), gather_once=True, rngs=rngs)
        self.kv_norm = RMSNorm(R, eps=norm_eps)
        self.k_up = Einsum("...R,NHR->...NH", (N, nope_dim, R), heads, gather_once=True, rngs=rngs)
        self.v_up = Einsum("...R,NHR->...NH", (N, v_dim, R), heads, gather_once=True, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, v_dim), ("embed", "heads", "head_dim"), rngs=rngs)
        self.mask, self.rope, self.scale = mask, rope, H**-0.5 if scale is None else scale
        self.num_heads, self.v_dim, self.kv_rank, self.nope_dim, self.implementation = (
            N,
            v_dim,
            R,
            nope_dim,
            implementation,
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        ctx: Context | None = None,
        cache: LatentCache | QuantizedLatentCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LatentCache | QuantizedLatentCache | None]:
        """One new token attends to the latents themselves; several at once first grow keys and values out of them."""
        ctx = context(*x.shape[:2]) if ctx is None else ctx
        q, latent = mark_heads(self.queries(x, ctx), "q"), checkpoint_name(self.latents(x, ctx), "latent")
        if cache is not None:
            cache = cache.extend(latent, ctx)
            latent = cache.latent
        run = self._absorbed if cache is not None and x.shape[1] == 1 else self._naive
        return self.o(run(q, latent.astype(x.dtype), ctx)), cache

    def queries(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T N H"]:
        """Returns queries, the unrotated part first."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        q = self.q_up(x)
        q = constrain(q, "batch", "seq", "act_heads", None)
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        return jnp.concatenate([nope, self._rotate(turned, ctx)], axis=-1)

    def latents(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T R"]:
        """Returns what the cache holds: the normed latent, then the rotated key that all heads share."""
        latent, key = jnp.split(self.kv_down(x), [self.kv_rank], axis=-1)
        return jnp.concatenate([self.kv_norm(latent), self._rotate(key[:, :, None], ctx)[:, :, 0]], axis=-1)

    def _rotate(self, x, ctx):
        return apply_rope(x, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)

    def _naive(self, q, latent, ctx):
        k, v = self._keys(latent), self.v_up(latent[..., : self.kv_rank])
        v = constrain(v, "batch", "seq", "act_heads", None)
        k, v = mark_heads(k, "k"), mark_heads(v, "v")
        options = {"scale": self.scale, "implementation": self.implementation, "zigzag": ctx.zigzag}
        return attend(q, k, v, *ctx.bounds(self.mask), **options)

    def _keys(self, latent):
        latent, key = jnp.split(latent, [self.kv_rank], axis=-1)
        k_nope = self.k_up(latent)
        key = jnp.broadcast_to(key[:, :, None], (*k_nope.shape[:3], key.shape[-1]))  # B S R -> B S N R: shared by heads
        return constrain(jnp.concatenate([k_nope, key], axis=-1), "batch", "seq", "act_heads", None)

    def _absorbed(self, q, latent, ctx):
        """The up-projections move to the queries and the output: one key head, which is the latent itself."""
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        nope = jnp.einsum("BTNH,NHR->BTNR", nope, jnp.asarray(self.k_up.w[...], q.dtype))
        q, k = jnp.concatenate([nope, turned], axis=-1), latent[:, :, None]
        out = attend(q, k, k[..., : self.kv_rank], *ctx.bounds(self.mask), scale=self.scale)
        return jnp.einsum("BTNR,NHR->BTNH", out, jnp.asarray(self.v_up.w[...], q.dtype))

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> LatentCache | QuantizedLatentCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens. int8 and float8 are quantized."""
        values = jnp.zeros((batch, capacity, self.kv_rank + self.rope.dim), dtype)
        if not is_quantized(dtype):
            return LatentCache(values)
        return QuantizedLatentCache(values, jnp.zeros((batch, capacity, 2)), self.kv_rank)

    def traffic(self, split: SplitSequence) -> Traffic:
        both = self.num_heads * (self.nope_dim + self.rope.dim + self.v_dim)
        return attention_traffic(split, queries=both, keys=both)

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        return self.queries(x, ctx), self._keys(self.latents(x, ctx))
