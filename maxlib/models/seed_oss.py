"""Seed-OSS (ByteDance Seed 2025): Llama's block at 36B, with biases on queries, keys and values only."""

from dataclasses import dataclass

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Seed-OSS; `PRESETS` has the published ones."""

    mlp_dim: int
    attention_bias: bool = True  # on queries, keys and values ...
    out_bias: bool = False  # ... and on what attention returns
    mlp_bias: bool = False


class Block(PreNorm):
    """Llama's layer, whose attention has its two kinds of biases apart."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=cfg.attention_bias, out_bias=cfg.out_bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)


class SeedOss(TextDecoder):
    """Seed-OSS: a Llama whose heads together are twice as wide as the residual stream, for texts of 512k tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        fields.ATTENTION_BIAS,
        Field("out_bias", "attention_out_bias"),
        Field("mlp_bias"),
    ],
    model_types={"seed_oss": "SeedOssForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"head_dim": 128},
)


# fmt: off
PRESETS = {
    "seed-oss-36b": Config(
        vocab=155_136, num_layers=64, dim=5120, mlp_dim=27_648, num_heads=80, num_kv_heads=8, head_dim=128,
        rope=Rope(128, 10_000_000.0, max_length=524_288),
    )
}
# fmt: on

FAMILY = Family("seed_oss", SeedOss, FIELDS, llama_table, PRESETS)
