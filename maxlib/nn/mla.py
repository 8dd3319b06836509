"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values grow out of one small latent."""

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Num

from maxlib.nn.attention import attend
from maxlib.nn.cache import is_quantized
from maxlib.nn.context import Context, context
from maxlib.nn.linear import Einsum
from maxlib.nn.norm import RMSNorm
from maxlib.nn.pytree import pytree, static
from maxlib.nn.remat import mark_heads
from maxlib.ops.attention import Causal, Mask
from maxlib.ops.rope import Rope, apply_rope
from maxlib.sharding import constrain


@pytree
class LatentCache:
    """The normed latent of each token beside its rotated key part: `kv_rank + rope.dim` numbers, whatever the heads."""

    latent: Float[Array, "B S R"]

    def extend(self, latent: Array, ctx: Context) -> "LatentCache":
        return LatentCache(_put(self.latent, latent, ctx))


@pytree
class QuantizedLatentCache:
    """The same rounded to int8 or a float8 when it comes. scales: of each token's latent and of its key part, which
    differ in size.
    """

    values: Num[Array, "B S R"]
    scales: Float[Array, "B S 2"]
    kv_rank: int = static()

    def extend(self, latent: Array, ctx: Context) -> "QuantizedLatentCache":
        parts = jnp.split(latent.astype(jnp.float32), [self.kv_rank], axis=-1)
        low = [qwix.quantize(x, self.values.dtype, channelwise_axes=(0, 1)) for x in parts]
        values, scales = (
            jnp.concatenate(both, axis=-1) for both in zip(*((q.qvalue, q.scale) for q in low), strict=True)
        )
        return QuantizedLatentCache(_put(self.values, values, ctx), _put(self.scales, scales, ctx), self.kv_rank)

    @property
    def latent(self) -> Float[Array, "B S R"]:
        sizes = jnp.array([self.kv_rank, self.values.shape[-1] - self.kv_rank])
        scales = jnp.repeat(self.scales, sizes, axis=-1, total_repeat_length=self.values.shape[-1])
        return self.values.astype(jnp.float32) * scales


def _put(old: Num[Array, "B S R"], new: Num[Array, "B T R"], ctx: Context) -> Num[Array, "B S R"]:
    if new.shape[1] > old.shape[1]:
        raise ValueError(f"{new.shape[1]} new tokens do not fit a cache of capacity {old.shape[1]}; make a larger one")
    put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0))
    return put(old, new.astype(old.dtype), ctx.length)


class MLA(nnx.Module):
    """Latent attention: each head's key is `nope_dim` numbers from the latent and `rope.dim` rotated ones shared by all
    heads.

    kv_rank: size of the latent. q_rank: size of the queries' own latent; None projects them directly. scale: factor on
    the scores, `(nope_dim + rope.dim) ** -0.5` by default (YaRN models multiply it by the square of their mscale).
    implementation: of `ops.attention`, None for the best one; a single new token against a cached latent is attention
    of another shape, which always gets the best one.
    """

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
            self.q_down = Einsum("...D,RD->...R", (q_rank, D), ("rank", "embed"), rngs=rngs)
            self.q_norm = RMSNorm(q_rank, eps=norm_eps)
            self.q_up = Einsum("...R,NHR->...NH", (N, H, q_rank), heads, rngs=rngs)
        self.kv_down = Einsum("...D,RD->...R", (R + rope.dim, D), ("rank", "embed"), rngs=rngs)
        self.kv_norm = RMSNorm(R, eps=norm_eps)
        self.k_up = Einsum("...R,NHR->...NH", (N, nope_dim, R), heads, rngs=rngs)
        self.v_up = Einsum("...R,NHR->...NH", (N, v_dim, R), heads, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, v_dim), ("embed", "heads", "head_dim"), rngs=rngs)
        self.mask, self.rope, self.scale = mask, rope, H**-0.5 if scale is None else scale
        self.kv_rank, self.nope_dim, self.implementation = R, nope_dim, implementation

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
        """Queries, the unrotated part first."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        q = self.q_up(x)
        q = constrain(q, "batch", "seq", "act_heads", None)
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        return jnp.concatenate([nope, self._rotate(turned, ctx)], axis=-1)

    def latents(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T R"]:
        """What the cache holds: the normed latent, then the rotated key that all heads share."""
        latent, key = jnp.split(self.kv_down(x), [self.kv_rank], axis=-1)
        return jnp.concatenate([self.kv_norm(latent), self._rotate(key[:, :, None], ctx)[:, :, 0]], axis=-1)

    def _rotate(self, x, ctx):
        return apply_rope(x, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)

    def _naive(self, q, latent, ctx):
        latent, key = jnp.split(latent, [self.kv_rank], axis=-1)
        k_nope, v = self.k_up(latent), self.v_up(latent)
        key = jnp.broadcast_to(key[:, :, None], (*k_nope.shape[:3], key.shape[-1]))
        k = constrain(jnp.concatenate([k_nope, key], axis=-1), "batch", "seq", "act_heads", None)
        v = constrain(v, "batch", "seq", "act_heads", None)
        k, v = mark_heads(k, "k"), mark_heads(v, "v")
        options = {"scale": self.scale, "implementation": self.implementation, "balanced": ctx.balanced}
        return attend(q, k, v, *ctx.bounds(self.mask), **options)

    def _absorbed(self, q, latent, ctx):
        """The up-projections move to the queries and the output: one key head, which is the latent itself."""
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        nope = jnp.einsum("BTNH,NHR->BTNR", nope, jnp.asarray(self.k_up.w[...], q.dtype))
        q, k = jnp.concatenate([nope, turned], axis=-1), latent[:, :, None]
        out = attend(q, k, k[..., : self.kv_rank], *ctx.bounds(self.mask), scale=self.scale)
        return jnp.einsum("BTNR,NHR->BTNH", out, jnp.asarray(self.v_up.w[...], q.dtype))

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> LatentCache | QuantizedLatentCache:
        """An empty cache for `batch` rows of up to `capacity` tokens. int8 and float8 are quantized."""
        values = jnp.zeros((batch, capacity, self.kv_rank + self.rope.dim), dtype)
        if not is_quantized(dtype):
            return LatentCache(values)
        return QuantizedLatentCache(values, jnp.zeros((batch, capacity, 2)), self.kv_rank)
