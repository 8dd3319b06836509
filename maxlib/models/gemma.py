"""Gemma 2B and 7B (Gemma team 2024, arXiv:2403.08295): scaled embeddings, GeGLU, norms that scale by one plus their
weight.
"""

from dataclasses import dataclass, replace

import jax
from flax import nnx

from maxlib import nn
from maxlib.models._layers import GemmaDecoder, PreNorm, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Gemma; `PRESETS` has the published ones."""

    mlp_dim: int
    tied: bool = True
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer with GeGLU: `down(gelu(gate(x)) * up(x))`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        # plus_one: x / rms(x) * (1 + w), with w = 0 at first, so that weight decay pulls the scale to one.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        # N * H need not be D: the 7B has 16 heads of 256 beside a width of 3072. The 2B has one key head (MQA).
        self.attn = attention(cfg, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)


class Gemma(GemmaDecoder):
    """Gemma: tied embeddings, scaled by sqrt(D) at the input."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gemma": "GemmaForCausalLM"},
    fixed={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the first releases say "gelu" and mean its tanh approximation
        "hidden_activation": "gelu_pytorch_tanh",
    },
    fixed_if_present={"use_bidirectional_attention": False},
    absent={"vocab": 256_000, "head_dim": 256},
)


# fmt: off
_7B = Config(
    vocab=256_000, num_layers=28, dim=3072, mlp_dim=24_576, num_heads=16, num_kv_heads=16, head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)
# fmt: on
PRESETS = {
    "gemma-2b": replace(_7B, num_layers=18, dim=2048, mlp_dim=16_384, num_heads=8, num_kv_heads=1),
    "gemma-7b": _7B,
}

FAMILY = Family("gemma", Gemma, FIELDS, llama_table, PRESETS)
