"""Llama 2 to 3.3: pre-norm, grouped-query attention, gated MLP (Touvron et al. 2023; Llama team 2024)."""

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Llama3Scaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, names, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Llama from another; `PRESETS` has the published ones."""

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

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "llama")
        fields.require("hidden_act", "silu")
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", None, kind=int)
        if head_dim is None and dim % num_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({num_heads}) must divide hidden_size ({dim}), or head_dim be given."
            )
        head_dim = dim // num_heads if head_dim is None else head_dim
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=fields.take("num_hidden_layers", kind=int),
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", False),
            attention_bias=fields.take("attention_bias", False),
            mlp_bias=fields.take("mlp_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Llama does not have."""
        if self.dim % self.num_heads:
            warnings.warn(
                f"num_heads ({self.num_heads}) does not divide dim ({self.dim}): maxlib reads the export, transformers 5 "
                "refuses such a config",
                stacklevel=3,
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


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


class Llama(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


_LLAMA2 = Config(
    vocab=32_000,
    num_layers=32,
    dim=4096,
    mlp_dim=11_008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rope=Rope(128, 10_000.0, max_length=4096),
)
_LLAMA3 = dataclasses.replace(
    _LLAMA2, vocab=128_256, mlp_dim=14_336, num_kv_heads=8, rope=Rope(128, 500_000.0, max_length=8192)
)
_70B = dict(num_layers=80, dim=8192, mlp_dim=28_672, num_heads=64, num_kv_heads=8)
_405B = dict(num_layers=126, dim=16_384, mlp_dim=53_248, num_heads=128, num_kv_heads=8)


def _stretched(cfg: Config, *, factor: float = 8.0, **changes) -> Config:
    """Llama 3 with the rotary scaling of 3.1 and later."""
    changed = dataclasses.replace(cfg, **changes)
    scaling = Llama3Scaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    return dataclasses.replace(changed, rope=Rope(changed.head_dim, 500_000.0, scaling, max_length=131_072))


PRESETS = {
    "llama2-7b": _LLAMA2,
    "llama2-13b": dataclasses.replace(_LLAMA2, num_layers=40, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40),
    "llama2-70b": dataclasses.replace(_LLAMA2, **_70B),
    "llama3-8b": _LLAMA3,
    "llama3-70b": dataclasses.replace(_LLAMA3, **_70B),
    "llama3-405b": dataclasses.replace(_LLAMA3, **_405B),
    "llama3.1-8b": _stretched(_LLAMA3),
    "llama3.1-70b": _stretched(_LLAMA3, **_70B),
    "llama3.1-405b": _stretched(_LLAMA3, **_405B),
    "llama3.2-1b": _stretched(_LLAMA3, factor=32.0, num_layers=16, dim=2048, mlp_dim=8192, head_dim=64, tied=True),
    "llama3.2-3b": _stretched(_LLAMA3, factor=32.0, num_layers=28, dim=3072, mlp_dim=8192, num_heads=24, tied=True),
    "llama3.3-70b": _stretched(_LLAMA3, **_70B),
}

FAMILY = Family(name="llama", model_types=("llama",), model=Llama, config=Config, table=_table, presets=PRESETS)
