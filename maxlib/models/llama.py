"""Llama 2 to 3.3: pre-norm, grouped-query attention, gated MLP (Touvron et al. 2023; Llama team 2024)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn, ops
from maxlib.ops.rope import Llama3Scaling, Rope
from maxlib.sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Llama(nnx.Module):
    """A decoder; `docs/decisions/0001` describes what trainers and generators expect of it."""

    softcap = None

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: nn.Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: nn.Policy = None,
    ) -> nn.Output:
        ctx = nn.context(
            *tokens.shape,
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            cache=cache,
            masks=(ops.Causal(),),
            ropes=(self.cfg.rope,),
        )
        x = constrain(self.embed(tokens, dtype=dtype), "batch", "seq", "act_embed")
        x, layers, aux = self.layers(x, ctx, cache and cache.layers, remat=remat)
        return nn.Output(self.norm(x), cache and cache.advanced(layers, ctx), aux)

    def head_weight(self) -> Float[Array, "V D"]:
        return (self.head or self.embed).w[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return constrain((self.head or self.embed).logits(hidden), "batch", "seq", "act_vocab")

    def init_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None):
        """An empty cache for `capacity` tokens a row; `rope_length` defaults to that capacity."""
        layers = self.layers.init_cache(batch, capacity, dtype)
        return nn.Cache(layers, jnp.zeros(batch, jnp.int32), rope_length or capacity)
