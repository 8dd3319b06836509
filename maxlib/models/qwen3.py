"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388): a norm on each head of queries and keys before their rotation."""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, WindowSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a Qwen3; `PRESETS` has the published ones."""

    mlp_dim: int
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer with norms on queries and keys."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        # One scale [H] for all heads. Scores stay bounded: |q . k| <= H * max(scale_q) * max(scale_k).
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Qwen3(TextDecoder):
    """Qwen3: Qwen2 with norms on queries and keys in place of biases, and a head width of its own."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        *fields.upper_layers_slide(FULL, absent=28, window=4096),
        fields.ATTENTION_BIAS,
    ],
    model_types={"qwen3": "Qwen3ForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"head_dim": 128},
)


# fmt: off
_8B = Config(
    vocab=151_936, num_layers=36, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=40_960),
)
# fmt: on
PRESETS = {
    "qwen3-0.6b": replace(_8B, num_layers=28, dim=1024, mlp_dim=3072, num_heads=16, tied=True),
    "qwen3-1.7b": replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16, tied=True),
    "qwen3-4b": replace(_8B, dim=2560, mlp_dim=9728, tied=True),
    "qwen3-8b": _8B,
    "qwen3-14b": replace(_8B, num_layers=40, dim=5120, mlp_dim=17_408, num_heads=40),
    "qwen3-32b": replace(_8B, num_layers=64, dim=5120, mlp_dim=25_600, num_heads=64),
}

FAMILY = Family("qwen3", Qwen3, FIELDS, llama_table, PRESETS)
