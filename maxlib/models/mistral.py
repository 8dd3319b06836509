"""Mistral 7B, Nemo, Small and Large: Llama's block, with a sliding window in the first release (Jiang et al. 2023)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, names, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Mistral from another; `PRESETS` has the published ones. window: None sees everything."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False

    @property
    def mask(self) -> ops.Mask:
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "mistral")
        fields.require("hidden_act", "silu")
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=fields.take("num_hidden_layers", kind=int),
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", kind=int, nullable=True) or num_heads,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            window=fields.take("sliding_window", 4096, nullable=True),
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Mistral does not have."""
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "sliding_window": self.window,
            "tie_word_embeddings": self.tied,
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
            mask=cfg.mask,
            rope=cfg.rope,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Mistral(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (cfg.mask,), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


_7B = Config(
    vocab=32_000,
    num_layers=32,
    dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
)
_LONG = Rope(128, 1_000_000.0, max_length=131_072)
PRESETS = {
    "mistral-7b-v0.1": dataclasses.replace(_7B, rope=Rope(128, 10_000.0, max_length=32_768), window=4096),
    "mistral-7b-v0.2": _7B,
    "mistral-7b-v0.3": dataclasses.replace(_7B, vocab=32_768),
    "mistral-nemo-12b": dataclasses.replace(_7B, vocab=131_072, num_layers=40, dim=5120, rope=_LONG),
    "mistral-small-22b": dataclasses.replace(_7B, vocab=32_768, num_layers=56, dim=6144, mlp_dim=16_384, num_heads=48),
    "mistral-small-24b": dataclasses.replace(
        _7B,
        vocab=131_072,
        num_layers=40,
        dim=5120,
        mlp_dim=32_768,
        rope=Rope(128, 100_000_000.0, max_length=32_768),
    ),
    "mistral-large-123b": dataclasses.replace(
        _7B, vocab=32_768, num_layers=88, dim=12_288, mlp_dim=28_672, num_heads=96, rope=_LONG
    ),
}

FAMILY = Family(name="mistral", model_types=("mistral",), model=Mistral, config=Config, table=_table, presets=PRESETS)
