"""Mixtral 8x7B and 8x22B: Mistral's block, with eight MLPs of which every token takes two (Jiang et al. 2024)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, Weight, names, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Mixtral from another; `PRESETS` has the published ones.

    window: None sees everything. losses: what the routers report for training, `nn.SwitchBalance(0.02)` say.
    """

    vocab: int
    num_layers: int
    dim: int
    expert_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    num_experts: int
    top_k: int
    window: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    losses: tuple[Any, ...] = ()

    @property
    def mask(self) -> ops.Mask:
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "mixtral")
        fields.require("hidden_act", "silu")
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=fields.take("num_hidden_layers", kind=int),
            dim=dim,
            expert_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", kind=int, nullable=True) or num_heads,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim, default_theta=1e6),
            num_experts=fields.take("num_local_experts", 8),
            top_k=fields.take("num_experts_per_tok", 2),
            window=fields.take("sliding_window", None, kind=int),
            norm_eps=fields.take("rms_norm_eps", 1e-5),
            tied=fields.take("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Mixtral does not have."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.expert_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
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
        router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
        self.moe = nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h, aux = self.moe(self.mlp_norm(x), ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Mixtral(nn.Decoder):
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
    moe = "block_sparse_moe"
    layer = [
        *names.NORMS,
        *names.ATTENTION,
        Weight(f"{moe}.gate.weight", "moe.router.gate.w"),
        Weight(f"{moe}.experts.{{e}}.w1.weight", "moe.gate.w", "O I -> e O I"),
        Weight(f"{moe}.experts.{{e}}.w3.weight", "moe.up.w", "O I -> e O I"),
        Weight(f"{moe}.experts.{{e}}.w2.weight", "moe.down.w", "O I -> e O I"),
    ]
    return names.decoder_table(layer)


_8X7B = Config(
    vocab=32_000,
    num_layers=32,
    dim=4096,
    expert_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
    num_experts=8,
    top_k=2,
)
_8X22B = dataclasses.replace(
    _8X7B,
    num_layers=56,
    dim=6144,
    expert_dim=16_384,
    num_heads=48,
    rope=Rope(128, 1_000_000.0, max_length=65_536),
)
PRESETS = {
    "mixtral-8x7b": _8X7B,
    "mixtral-8x22b": _8X22B,
    "mixtral-8x22b-instruct": dataclasses.replace(_8X22B, vocab=32_768),
}

FAMILY = Family(name="mixtral", model_types=("mixtral",), model=Mixtral, config=Config, table=_table, presets=PRESETS)
