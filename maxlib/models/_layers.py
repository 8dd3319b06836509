"""Layers and models that many families share, made from their configurations.

`llama.py` writes all of it out. Letters in shapes are those of `llama.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._sizes import (
    AttentionSizes,
    DeltaSizes,
    ExpertSizes,
    KimiDeltaSizes,
    LatentSizes,
    MambaSizes,
    RouterSizes,
)
from maxlib.ops import Rope, YarnScaling
from maxlib.sharding import constrain


class TextDecoder(nn.Decoder):
    """Decoder of an embedding, layers, a norm and a head, which is the embedding if `cfg.tied`.

    Args:
        cfg: The configuration.
        block: Makes a layer of a kind, `block(kind, rngs)`.
        kinds: The kind of each layer, or the number of layers that are all alike.
        embed_init: Initializer of the embedding.
        plus_one: True adds one to the weights of the norm.
        norm: The norm before the head; None means an RMSNorm.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        cfg: Any,
        block: Callable[[Any, nnx.Rngs], nnx.Module],
        kinds: Sequence[Any] | int,
        *,
        embed_init: Any = None,
        plus_one: bool = False,
        norm: Any = None,
        rngs: nnx.Rngs,
    ):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=embed_init, rngs=rngs)
        self.layers = nn.Stack(block, kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=plus_one) if norm is None else norm
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


class PositionedDecoder(nn.Decoder):
    """Decoder that adds a trained vector for each position to its first input (`nn.LearnedPositions`).

    Attributes:
        positions: The table.
        first_position: Row of the first token.
    """

    positions: nn.LearnedPositions
    first_position: int = 0

    def enter(self, x: Float[Array, "B T D"], *, cache: nn.cache.Cache | None = None, **inputs: Any):
        """Returns `x` with its positions added, and the context; see `nn.Decoder.enter`."""
        x, ctx = super().enter(x, cache=cache, **inputs)
        # Added after a split sequence is reordered, by the tokens' positions, which are reordered with them.
        first, length = self.first_position, ctx.rope_length
        rows = replace(ctx, positions=ctx.positions + first, rope_length=None if length is None else length + first)
        return constrain(x + self.positions(rows, dtype=x.dtype), "batch", "seq", "act_embed"), ctx

    @property
    def max_length(self) -> int:
        """Number of positions that text can have."""
        return self.positions.length - self.first_position

    def init_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None):
        """Returns an empty cache for `capacity` tokens a row. Raises ValueError if there are fewer positions."""
        self.positions.check(capacity + self.first_position)
        return super().init_cache(batch, capacity, dtype=dtype)


class GemmaDecoder(TextDecoder):
    """Decoder whose embedding is scaled by sqrt(D) at the input, and whose norms add one to their weights."""

    def __init__(self, cfg: Any, block: Callable[[Any, nnx.Rngs], nnx.Module], kinds: Any, *, rngs: nnx.Rngs):
        # Scaled by sqrt(D), the vectors come out with variance one.
        super().__init__(cfg, block, kinds, embed_init=nnx.initializers.normal(cfg.dim**-0.5), plus_one=True, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


class ScaledDecoder(TextDecoder):
    """Decoder with a factor on its input, and a divisor of what its head reads (Granite)."""

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        return self.cfg.embed_factor * self.embed(tokens, dtype=dtype)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head, divided."""
        # Applied here instead of in `logits`, because the loss uses hidden states and `head_weight` without `logits`.
        return super().leave(x, ctx) / self.cfg.logit_divisor


class PreNorm(nn.Layer):
    """Llama's layer: each branch reads the normed residual stream, and adds to it.

    A subclass makes `attn_norm`, a mixer of tokens (`attn`, `delta`, `conv` or `mamba`), `mlp_norm`, and `mlp` or
    `moe`. `attn_post_norm` and `mlp_post_norm` normalize the output of a branch, and `factor` multiplies it, before it
    is added. A norm that is None is skipped.
    """

    attn_norm: Any = None
    attn_post_norm: Any = None
    delta: Any = None
    conv: Any = None
    mamba: Any = None
    mlp_norm: Any = None
    mlp_post_norm: Any = None
    mlp: Any = None
    moe: Any = None
    factor: float | None = None

    @property
    def mixer(self) -> Any:
        """The layer that mixes tokens."""
        return self.attn or self.delta or self.conv or self.mamba

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.mixer(x if self.attn_norm is None else self.attn_norm(x), ctx, cache)
        x = nn.residual(x, self._scaled(h), "attn", norm=self.attn_post_norm)
        h = x if self.mlp_norm is None else self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return nn.residual(x, self._scaled(h), "mlp", norm=self.mlp_post_norm), cache, aux

    def _scaled(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return h if self.factor is None else self.factor * h

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns the mixer's empty cache."""
        return self.mixer.init_cache(batch, capacity, dtype)


class CrossPreNorm(PreNorm):
    """`PreNorm` with a branch of `cross`, attention to an encoder's output, after `attn`; it reads `cross_norm(x)`.

    A layer without `cross` is a `PreNorm`.
    """

    cross: Any = None
    cross_norm: Any = None
    cross_post_norm: nn.RMSNorm | None = None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        if self.cross is None:
            return super().__call__(x, ctx, cache)
        attn_cache, cross_cache = (None, None) if cache is None else cache
        h, attn_cache = self.attn(self.attn_norm(x), ctx, attn_cache)
        x = nn.residual(x, h, "attn", norm=self.attn_post_norm)
        h, cross_cache = self.cross(self.cross_norm(x), ctx, cross_cache)
        x = nn.residual(x, h, "cross_attn", norm=self.cross_post_norm)
        x = nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp", norm=self.mlp_post_norm)
        return x, None if cache is None else (attn_cache, cross_cache), {}

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns the empty caches of both attentions."""
        return self.attn.init_cache(batch, capacity, dtype), self.cross.init_cache(batch, capacity, dtype)


class DeepstackPreNorm(PreNorm):
    """`PreNorm` that adds features of the image encoder to its output, if the layer gets any (`added`)."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        ctx: nn.Context,
        cache: Any = None,
        added: Float[Array, "B T D"] | None = None,
    ):
        x, cache, aux = super().__call__(x, ctx, cache)
        return x if added is None else constrain(x + added, "batch", "seq", "act_embed"), cache, aux


class Parallel(nn.Layer):
    """Layer whose branches read the same residual stream, `x + attn(attn_norm(x)) + mlp(mlp_norm(x))`.

    A subclass makes `attn_norm`, `attn` and `mlp`, and `mlp_norm` unless both branches share one norm.
    """

    attn_norm: Any
    mlp: Any
    mlp_norm: Any = None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        normed = self.attn_norm(x)
        h, cache = self.attn(normed, ctx, cache)
        mlp = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        return nn.residual(nn.residual(x, h, "attn"), mlp, "mlp"), cache, {}


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `max(x, 0)^2`."""
    return jnp.square(jax.nn.relu(x))


def attention(
    cfg: AttentionSizes,
    kind: Callable[..., nn.Attention] = nn.Attention,
    *,
    rope: Rope | ops.MRope | None,
    qk_norm: bool = False,
    across_heads: bool = False,
    plus_one: bool = False,
    rngs: nnx.Rngs,
    **options: Any,
) -> nn.Attention:
    """Makes grouped-query attention of a `kind` with the sizes of `cfg`; other arguments are those of the kind.

    `qk_norm` adds an RMSNorm of each head of queries and keys before their rotation, or with `across_heads` one of all
    heads together. With `plus_one` these norms multiply by one plus their weight.
    """

    def norm(heads: int) -> nn.RMSNorm:
        if across_heads:
            return nn.norm.HeadsRMSNorm(heads * cfg.head_dim, eps=cfg.norm_eps)
        return nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=plus_one)

    if qk_norm:
        options |= {"q_norm": norm(cfg.num_heads), "k_norm": norm(cfg.num_kv_heads)}
    return kind(
        cfg.dim,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        rope=rope,
        rngs=rngs,
        **options,
    )


def latent_attention(cfg: LatentSizes, kind: Any = nn.MLA, *, rope: Rope | None, rngs: nnx.Rngs, **options: Any) -> Any:
    """Makes latent attention of a `kind` with the sizes of `cfg`; other arguments are those of `nn.MLA`.

    All heads compute keys and values from one latent per token, [B, T, kv_rank]. The cache stores only this latent and
    one rotary key, [B, T, rope.dim]. A query has `nope_dim` dimensions without rotation, then `rope.dim` rotated ones.
    """
    return kind(  # the norms of the latents have the default epsilon, independent of `norm_eps`
        cfg.dim,
        num_heads=cfg.num_heads,
        q_rank=cfg.q_rank,
        kv_rank=cfg.kv_rank,
        nope_dim=cfg.nope_dim,
        v_dim=cfg.v_dim,
        rope=rope,
        scale=None if rope is None else latent_scale(cfg.nope_dim, rope),
        rngs=rngs,
        **options,
    )


def latent_scale(nope_dim: int, rope: Rope) -> float:
    """Returns the factor on the scores of latent attention."""
    scale, scaling = (nope_dim + rope.dim) ** -0.5, rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    return scale


def hyper_connection(cfg: Any, *, rngs: nnx.Rngs) -> nn.HyperConnection:
    """Makes the reading, mixing and writing of streams with the sizes of `cfg` (`StreamSizes`)."""
    return nn.HyperConnection(
        cfg.dim,
        streams=cfg.streams,
        sinkhorn_steps=cfg.sinkhorn_steps,
        eps=cfg.stream_eps,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def sigmoid_router(dim: int, cfg: RouterSizes, *, rngs: nnx.Rngs) -> nn.Router:
    """Makes DeepSeek V3's router of tokens of width `dim` with the sizes of `cfg`."""
    return nn.router.sigmoid_router(
        dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        num_groups=cfg.num_groups,
        top_groups=cfg.top_groups,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        rngs=rngs,
    )


def deepseek_experts(cfg: ExpertSizes, *, router: nn.Router | None = None, rngs: nnx.Rngs) -> nn.MoE:
    """Makes DeepSeek's experts with the sizes of `cfg`: many small ones, and shared ones for every token.

    Args:
        cfg: The sizes.
        router: The router; None means DeepSeek V3's.
        rngs: Source of initial values.
    """
    router = sigmoid_router(cfg.dim, cfg, rngs=rngs) if router is None else router
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


def gated_shared_experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    """Makes Qwen's experts with the sizes of `cfg`; every token also uses a shared one, multiplied by a gate."""
    # Softmax over all E experts; each token uses the best k.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.shared_dim, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, shared_gate=True, losses=cfg.losses, rngs=rngs)


def kimi_delta_attention(
    cfg: KimiDeltaSizes, *, lower_bound: float | None = None, rngs: nnx.Rngs
) -> nn.KimiDeltaAttention:
    """Makes Kimi delta attention with the sizes of `cfg`; `lower_bound` limits its log decay, None does not."""
    return nn.KimiDeltaAttention(
        cfg.dim,
        num_heads=cfg.delta_heads,
        head_dim=cfg.delta_dim,
        conv_width=cfg.conv_width,
        lower_bound=lower_bound,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def mamba2(
    dim: int,
    cfg: MambaSizes,
    *,
    head_dim: int,
    out_bias: bool | None = None,
    factors: tuple[float, float, float, float, float] | None = None,
    norm: Literal["norm_first", "gate_first"] | None = "gate_first",
    norm_eps: float,
    rngs: nnx.Rngs,
) -> nn.Mamba2:
    """Makes Mamba-2 with the sizes of `cfg`; the other arguments are those of `nn.Mamba2`."""
    return nn.Mamba2(
        dim,
        num_heads=cfg.mamba_heads,
        head_dim=head_dim,
        num_groups=cfg.mamba_groups,
        state_dim=cfg.mamba_state,
        conv_width=cfg.conv_width,
        conv_bias=cfg.conv_bias,
        bias=cfg.mamba_bias,
        out_bias=out_bias,
        dt_limit=cfg.dt_limit,
        factors=factors,
        norm=norm,
        norm_eps=norm_eps,
        rngs=rngs,
    )


def delta_net(
    cfg: DeltaSizes,
    *,
    max_step: float = 1.0,
    out_gate_act: Callable[[Array], Array] = jax.nn.silu,
    norm_eps: float,
    rngs: nnx.Rngs,
) -> nn.GatedDeltaNet:
    """Makes gated DeltaNet with the sizes of `cfg`; the other arguments are those of `nn.GatedDeltaNet`."""
    return nn.GatedDeltaNet(
        cfg.dim,
        num_heads=cfg.num_value_heads,
        num_key_heads=cfg.num_key_heads,
        key_dim=cfg.key_dim,
        value_dim=cfg.value_dim,
        conv_width=cfg.conv_width,
        max_step=max_step,
        out_gate_act=out_gate_act,
        norm_eps=norm_eps,
        rngs=rngs,
    )
