"""Qwen3, dense: queries and keys are normed head by head before they are rotated (Qwen team 2025)."""

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

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Qwen3 from another; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None  # of the sliding layers
    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING each; None: all FULL
    norm_eps: float = 1e-6
    tied: bool = False
    attention_bias: bool = False

    def __post_init__(self):
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}")
        if SLIDING in (self.layer_types or ()) and self.window is None:
            raise ValueError(
                f"layer_types has {SLIDING}, which needs a window (config.json: use_sliding_window and sliding_window)"
            )

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """What each layer sees."""
        if self.layer_types is None or self.window is None:
            return (ops.Causal(),) * self.num_layers
        masks = {FULL: ops.Causal(), SLIDING: ops.Causal() & ops.SlidingWindow(self.window)}
        return tuple(masks[kind] for kind in self.layer_types)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "qwen3")
        fields.require("hidden_act", "silu")
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", 128)
        num_layers = fields.take("num_hidden_layers", kind=int)
        window = fields.take("sliding_window", 4096, nullable=True)
        window = window if fields.take("use_sliding_window", False) else None
        full = fields.take("max_window_layers", 28)
        types = fields.layer_types(num_layers, FULL, SLIDING)
        types = types or tuple(FULL if window is None or i < full else SLIDING for i in range(num_layers))
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=num_layers,
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", kind=int, nullable=True) or num_heads,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            window=window if SLIDING in types else None,
            layer_types=types if SLIDING in types else None,
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", False),
            attention_bias=fields.take("attention_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Qwen3 does not have."""
        types = self.layer_types or (FULL,) * self.num_layers
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "use_sliding_window": SLIDING in types,
            "sliding_window": self.window,
            "max_window_layers": types.count(FULL),  # all that early versions of transformers look at
            "layer_types": list(types),
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


class Block(nnx.Module):
    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            q_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps),
            k_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps),
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


class Qwen3(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        masks = cfg.masks
        make = lambda i, rngs: Block(cfg, masks[i], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(masks), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


_8B = Config(
    vocab=151_936,
    num_layers=36,
    dim=4096,
    mlp_dim=12_288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=40_960),
)
PRESETS = {
    "qwen3-0.6b": dataclasses.replace(_8B, num_layers=28, dim=1024, mlp_dim=3072, num_heads=16, tied=True),
    "qwen3-1.7b": dataclasses.replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16, tied=True),
    "qwen3-4b": dataclasses.replace(_8B, dim=2560, mlp_dim=9728, tied=True),
    "qwen3-8b": _8B,
    "qwen3-14b": dataclasses.replace(_8B, num_layers=40, dim=5120, mlp_dim=17_408, num_heads=40),
    "qwen3-32b": dataclasses.replace(_8B, num_layers=64, dim=5120, mlp_dim=25_600, num_heads=64),
}

FAMILY = Family(name="qwen3", model_types=("qwen3",), model=Qwen3, config=Config, table=_table, presets=PRESETS)
