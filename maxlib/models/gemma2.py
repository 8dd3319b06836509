"""Gemma 2: local and global layers in turn, norms before and after, soft-capped logits (Gemma team 2024,
arXiv:2408.00118).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, Weight, names, rope_to_hf

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def _in_turn(num_layers: int) -> tuple[str, ...]:
    return tuple(GLOBAL if i % 2 else LOCAL for i in range(num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Gemma 2 from another; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 4096  # of the local layers
    layer_types: tuple[str, ...] | None = None  # LOCAL or GLOBAL each; None: in turn, local first
    query_scalar: int = 256  # scores are multiplied by its inverse square root
    attention_softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "gemma2")
        fields.require("hidden_activation", "gelu_pytorch_tanh")
        fields.require("hidden_act", "gelu_pytorch_tanh")  # never read by transformers; the releases have both
        fields.require("use_bidirectional_attention", False)
        num_layers = fields.take("num_hidden_layers", kind=int)
        layer_types = fields.layer_types(num_layers, LOCAL, GLOBAL)
        head_dim = fields.take("head_dim", 256)
        return cls(
            vocab=fields.take("vocab_size", 256_000),
            num_layers=num_layers,
            dim=fields.take("hidden_size", kind=int),
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=fields.take("num_attention_heads", kind=int),
            num_kv_heads=fields.take("num_key_value_heads", kind=int),
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            window=fields.take("sliding_window", 4096),
            layer_types=None if layer_types == _in_turn(num_layers) else layer_types,
            query_scalar=fields.take("query_pre_attn_scalar", 256),
            attention_softcap=fields.take("attn_logit_softcapping", 50.0, nullable=True),
            final_softcap=fields.take("final_logit_softcapping", 30.0, nullable=True),
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", True),
            attention_bias=fields.take("attention_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's class does not have."""
        return {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": list(self.layer_types or _in_turn(self.num_layers)),
            "sliding_window": self.window,
            "query_pre_attn_scalar": self.query_scalar,
            "attn_logit_softcapping": self.attention_softcap,
            "final_logit_softcapping": self.final_softcap,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


class Block(nnx.Module):
    """Sandwich norms: each branch is normed before and after."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            scale=cfg.query_scalar**-0.5,
            softcap=cfg.attention_softcap,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.attn_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Gemma2(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, self.softcap = cfg, cfg.final_softcap
        types = cfg.layer_types or _in_turn(cfg.num_layers)
        masks = {LOCAL: ops.Causal() & ops.SlidingWindow(cfg.window), GLOBAL: ops.Causal()}
        self.masks, self.ropes = tuple(masks.values()), (cfg.rope,)
        make = lambda i, rngs: Block(cfg, masks[types[i]], rngs=rngs)
        # Scaled by sqrt(dim), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(types), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        # The factor is rounded to the compute dtype, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    layer = [
        Weight("input_layernorm.weight", "attn_norm.scale"),
        *names.ATTENTION,
        Weight("post_attention_layernorm.weight", "attn_post_norm.scale"),
        Weight("pre_feedforward_layernorm.weight", "mlp_norm.scale"),
        *names.MLP,
        Weight("post_feedforward_layernorm.weight", "mlp_post_norm.scale"),
    ]
    return names.decoder_table(layer)


_9B = Config(
    vocab=256_000,
    num_layers=42,
    dim=3584,
    mlp_dim=14_336,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)

PRESETS = {
    "gemma2-2b": dataclasses.replace(_9B, num_layers=26, dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2-9b": _9B,
    "gemma2-27b": dataclasses.replace(
        _9B,
        num_layers=46,
        dim=4608,
        mlp_dim=36_864,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        rope=Rope(128, 10_000.0, max_length=8192),
        query_scalar=144,
    ),
}

FAMILY = Family(name="gemma2", model_types=("gemma2",), model=Gemma2, config=Config, table=_table, presets=PRESETS)
