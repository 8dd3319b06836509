"""Granite 3 (IBM 2024): Llama with factors on embeddings, scores, residuals and logits."""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, ScaledDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Granite; `PRESETS` has the published ones."""

    mlp_dim: int
    embed_factor: float = 1.0
    score_factor: float = 1.0  # in place of head_dim ** -0.5
    residual_factor: float = 1.0
    logit_divisor: float = 1.0
    norm_eps: float = 1e-5
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer, whose branches are scaled before they are added."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, scale=cfg.score_factor, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.factor = cfg.residual_factor


class Granite(ScaledDecoder):
    """Granite: a Llama whose activations keep their size at any depth and width, by four factors."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        *fields.MULTIPLIERS,
        fields.ATTENTION_BIAS,
    ],
    model_types={"granite": "GraniteForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads, "norm_eps": 1e-6},
)


# fmt: off
_2B = Config(
    vocab=49_152, num_layers=40, dim=2048, mlp_dim=8192, num_heads=32, num_kv_heads=8, head_dim=64,
    rope=Rope(64, 10_000.0, max_length=4096), embed_factor=12.0, score_factor=0.015625, residual_factor=0.22,
    logit_divisor=8.0, tied=True,
)
PRESETS = {
    "granite-3.0-2b": _2B,
    "granite-3.0-8b": replace(
        _2B, dim=4096, mlp_dim=12_800, head_dim=128, rope=replace(_2B.rope, dim=128), score_factor=0.0078125,
        logit_divisor=16.0,
    ),
}
# fmt: on

FAMILY = Family("granite", Granite, FIELDS, llama_table, PRESETS)
