"""Gemma 2B and 7B: scaled embeddings, GeGLU, norms that scale by one plus their weight (Gemma team 2024,
arXiv:2403.08295).
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
from maxlib.weights import Family, HFConfig, Table, names, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Gemma from another; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "gemma")
        # The first releases say "gelu" and mean its tanh approximation.
        fields.require("hidden_act", "gelu_pytorch_tanh", "gelu")
        fields.require("hidden_activation", "gelu_pytorch_tanh")
        fields.require("use_bidirectional_attention", False)
        head_dim = fields.take("head_dim", 256)
        return cls(
            vocab=fields.take("vocab_size", 256_000),
            num_layers=fields.take("num_hidden_layers", kind=int),
            dim=fields.take("hidden_size", kind=int),
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=fields.take("num_attention_heads", kind=int),
            num_kv_heads=fields.take("num_key_value_heads", kind=int),
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", True),
            attention_bias=fields.take("attention_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's class does not have."""
        return {
            "architectures": ["GemmaForCausalLM"],
            "model_type": "gemma",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
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
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Gemma(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        # Scaled by sqrt(dim), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        # The factor is rounded to the compute dtype, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


_7B = Config(
    vocab=256_000,
    num_layers=28,
    dim=3072,
    mlp_dim=24_576,
    num_heads=16,
    num_kv_heads=16,
    head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)

PRESETS = {
    "gemma-2b": dataclasses.replace(_7B, num_layers=18, dim=2048, mlp_dim=16_384, num_heads=8, num_kv_heads=1),
    "gemma-7b": _7B,
}

FAMILY = Family(name="gemma", model_types=("gemma",), model=Gemma, config=Config, table=_table, presets=PRESETS)
