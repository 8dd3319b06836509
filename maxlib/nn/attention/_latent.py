"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values are computed from one small latent.

Shapes: B rows, T new tokens, S keys, D width, N heads, R latent size (with the rotated key where cached), H head width.
"""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum
from maxlib.nn.attention._grouped_query import attend, check_mask
from maxlib.nn.cache import LatentCache, QuantizedLatentCache, is_quantized
from maxlib.nn.decoder._context import Context, check_prefix, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.norm import RMSNorm
from maxlib.nn.remat import mark_heads
from maxlib.ops import Causal, Mask, Rope, apply_rope
from maxlib.sharding import constrain


def _shared_dim(rope: Rope | None, shared_dim: int | None) -> int:
    """Returns the size of the part of keys that heads share."""
    size = rope.dim if shared_dim is None and rope is not None else shared_dim
    if size is None or (rope is not None and size != rope.dim):
        raise ValueError(
            f"MLA needs rope=, or without one shared_dim=, the size of the part of keys that heads share; with both, "
            f"shared_dim must be rope.dim. Got rope={rope} and shared_dim={shared_dim}"
        )
    return size


class MLA(SequenceMixer):
    """Multi-head latent attention: keys and values of all heads are projections of one small latent per token.

    Each head's key has `nope_dim` numbers computed from the latent and `shared_dim` rotated ones that all heads share.
    The cache stores only the latent and the shared part.

        mla = nn.MLA(64, num_heads=4, kv_rank=32, nope_dim=16, v_dim=16, rope=ops.Rope(8), rngs=nnx.Rngs(0))
        y, _ = mla(jnp.ones((2, 8, 64)))  # B T D, causal

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of heads.
        kv_rank: Size of the latent.
        nope_dim: Numbers of a head's key and query that are not rotated.
        v_dim: Width of a head's value.
        rope: Rotation of the shared part of keys, and of as many numbers of each query; None rotates nothing.
        shared_dim: Size of the shared part, which may be 0; by default, and wherever something is rotated, `rope.dim`.
        q_rank: Size of the latent of queries; None projects them directly.
        mask: Which keys a query attends to, a mask of `maxlib.ops`.
        scale: Factor on the scores, by default `(nope_dim + shared_dim) ** -0.5`. YaRN models multiply it by the
            square of their mscale.
        norm_eps: Epsilon of the norms of both latents.
        temperature: Maps a token's index in its document to a factor on its query, such as `TemperatureTuning`.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one. Decoding one token has
            other shapes and always uses the best one.
        rngs: Source of initial values.

    Raises:
        TypeError: when `mask` is not a mask.
        ValueError: when `mask` has a sliding window that is not causal, or `shared_dim` is not that of the rope.
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
        rope: Rope | None,
        shared_dim: int | None = None,
        q_rank: int | None = None,
        mask: Mask = Causal(),
        scale: float | None = None,
        norm_eps: float = 1e-6,
        temperature: Callable[[Array], Array] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        check_mask(mask)
        shared = _shared_dim(rope, shared_dim)
        D, N, R, H = dim, num_heads, kv_rank, nope_dim + shared
        wide, heads = ("heads", "head_dim", "embed"), ("heads", "head_dim", "rank")
        # In large models queries have a latent of their own: q_up(norm(q_down(x))).
        if q_rank is None:
            self.q_down, self.q_norm = None, None
            self.q_up = Einsum("...D,NHD->...NH", (N, H, D), wide, rngs=rngs)
        else:
            self.q_down = Einsum("...D,RD->...R", (q_rank, D), ("rank", "embed"), gather_once=True, rngs=rngs)
            self.q_norm = RMSNorm(q_rank, eps=norm_eps)
            self.q_up = Einsum("...R,NHR->...NH", (N, H, q_rank), heads, gather_once=True, rngs=rngs)
        # [B, T, D] -> [B, T, R + shared]: the latent, followed by the rotated key part that all heads share.
        self.kv_down = Einsum("...D,RD->...R", (R + shared, D), ("rank", "embed"), gather_once=True, rngs=rngs)
        self.kv_norm = RMSNorm(R, eps=norm_eps)
        # [B, S, R] -> [B, S, N, nope_dim] and [B, S, N, v_dim]
        self.k_up = Einsum("...R,NHR->...NH", (N, nope_dim, R), heads, gather_once=True, rngs=rngs)
        self.v_up = Einsum("...R,NHR->...NH", (N, v_dim, R), heads, gather_once=True, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, v_dim), ("embed", "heads", "head_dim"), rngs=rngs)
        self.mask, self.rope, self.scale = mask, rope, H**-0.5 if scale is None else scale
        self.num_heads, self.v_dim, self.kv_rank, self.nope_dim, self.shared_dim = N, v_dim, R, nope_dim, shared
        self.temperature, self.implementation = temperature, implementation

    def __call__(
        self,
        x: Float[Array, "B T D"],
        ctx: Context | None = None,
        cache: LatentCache | QuantizedLatentCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LatentCache | QuantizedLatentCache | None]:
        """Mixes the tokens of each document.

        A single new token with a cache attends to the latents themselves (`_absorbed`). Otherwise keys and values of
        all heads are computed first (`_naive`), which costs fewer operations when there are many queries.

        Args:
            x: Input, `B T D`.
            ctx: Values shared by all layers (`nn.make_context`); None treats each row as one document from position 0.
            cache: Latents of earlier tokens, or None.

        Returns:
            The output, `B T D`, and the cache with the new tokens (None without one).
        """
        ctx = context_of(x, ctx)
        q, latent = mark_heads(self.queries(x, ctx), "q"), checkpoint_name(self.latents(x, ctx), "latent")
        # [B, T, R] -> [B, S, R]: all stored latents, indexed by the bounds as the keys of a KV cache are.
        if cache is not None:
            q = check_prefix(q, self.mask, ctx)
            cache = cache.extend(latent, ctx)
            latent = cache.latent
        run = self._absorbed if cache is not None and x.shape[1] == 1 else self._naive
        heads = run(q, latent.astype(x.dtype), ctx, ctx.mask_hint(self.mask, cache))
        return self.o(checkpoint_name(heads, "heads")), cache

    def queries(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T N H"]:
        """Returns queries `B T N H`, the unrotated part first."""
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        # [B, T, D] or [B, T, q_rank] -> [B, T, N, H]
        q = self.q_up(x)
        q = constrain(q, "batch", "seq", "act_heads", None)
        # Indexed by position within the document, so packing does not change it. [B, T] -> [B, T, 1, 1]
        if self.temperature is not None:
            q = (q * self.temperature(ctx.index - ctx.start)[:, :, None, None]).astype(q.dtype)
        # H = nope_dim + shared_dim
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        return jnp.concatenate([nope, self._rotate(turned, ctx)], axis=-1)

    def latents(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T R"]:
        """Returns what the cache stores: the normed latent, then the rotated key part that all heads share."""
        latent, key = jnp.split(self.kv_down(x), [self.kv_rank], axis=-1)
        # The rotation needs a head axis: [B, T, R] -> [B, T, 1, R]. Only the latent is normalized.
        return jnp.concatenate([self.kv_norm(latent), self._rotate(key[:, :, None], ctx)[:, :, 0]], axis=-1)

    def _rotate(self, x, ctx):
        """Rotates the last axis by each token's position, if there is a rope."""
        if self.rope is None:
            return x
        return apply_rope(x, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)

    def _naive(self, q, latent, ctx, mask_hint, bias=None):
        """Computes keys and values of all heads from the latents, then attends as multi-head attention does."""
        # [B, S, R] -> [B, S, N, H] and [B, S, N, v_dim]
        k, v = self._keys(latent), self.v_up(latent[..., : self.kv_rank])
        v = constrain(v, "batch", "seq", "act_heads", None)
        k, v = mark_heads(k, "k"), mark_heads(v, "v")
        options = {
            "scale": self.scale,
            "implementation": self.implementation,
            "zigzag": ctx.zigzag,
            "mask_hint": mask_hint,
            "bias": bias,
        }
        return attend(q, k, v, *ctx.key_intervals(self.mask), **options)

    def _keys(self, latent):
        """Returns keys `B S N H`: each head's part of the latent, then the shared rotated part."""
        latent, key = jnp.split(latent, [self.kv_rank], axis=-1)
        k_nope = self.k_up(latent)
        key = jnp.broadcast_to(key[:, :, None], (*k_nope.shape[:3], key.shape[-1]))  # B S R -> B S N R: shared by heads
        return constrain(jnp.concatenate([k_nope, key], axis=-1), "batch", "seq", "act_heads", None)

    def _absorbed(self, q, latent, ctx, mask_hint, bias=None):
        """Attends to the latents as one shared key head, with the up-projections moved to queries and outputs.

        `q . (k_up @ latent) = (q @ k_up) . latent`, and values likewise, so keys and values never exist per head.
        """
        # Multi-query attention: one key head, the latent and the rotated part, [B, S, R] -> [B, S, 1, R].
        q, k = self._absorb(q), latent[:, :, None]
        # The values are the latents without the rotated part: [B, T, N, R].
        options = {"scale": self.scale, "mask_hint": mask_hint, "bias": bias}
        out = attend(q, k, self.kv_rank, *ctx.key_intervals(self.mask), **options)
        return self.v_up.product("BTNR,NHR->BTNH", out)

    def _absorb(self, q):
        """Moves the up-projection of keys to the queries: `B T N H` becomes `B T N R`."""
        nope, turned = jnp.split(q, [self.nope_dim], axis=-1)
        # [B, T, N, nope_dim] -> [B, T, N, R]
        return jnp.concatenate([self.k_up.product("BTNH,NHR->BTNR", nope), turned], axis=-1)

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> LatentCache | QuantizedLatentCache:
        """Makes an empty cache for `batch` rows of up to `capacity` tokens; int8 and float8 round the latents."""
        values = jnp.zeros((batch, capacity, self.kv_rank + self.shared_dim), dtype)
        if not is_quantized(dtype):
            return LatentCache(values)
        return QuantizedLatentCache(values, jnp.zeros((batch, capacity, 2)), self.kv_rank)

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that attention sends in a training step (`SplitSequence.attention`)."""
        # In training, keys and values are computed for every head, so they are as large as queries and outputs.
        both = self.num_heads * (self.nope_dim + self.shared_dim + self.v_dim)
        return split.attention(queries=both, keys=both)

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: Context) -> tuple[Array, Array]:
        """Returns the queries and keys `B T N H` that enter the scores, for probes."""
        return self.queries(x, ctx), self._keys(self.latents(x, ctx))

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return () if self.temperature is None else ("temperature tuning",)
