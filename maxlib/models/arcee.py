"""Arcee Foundation Models (Arcee AI 2025): Llama with a squared ReLU, without a gate, in place of SwiGLU."""

from dataclasses import dataclass

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention, squared_relu
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an AFM; `PRESETS` has the published one."""

    mlp_dim: int
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Llama's layer with an MLP without a gate."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=squared_relu, bias=cfg.mlp_bias, rngs=rngs)


class Arcee(TextDecoder):
    """AFM: most of its activations are zeros."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [*DECODER, fields.rope(), fields.ATTENTION_BIAS, Field("mlp_bias")],
    model_types={"arcee": "ArceeForCausalLM"},
    fixed={"hidden_act": "relu2"},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads},
)


# fmt: off
PRESETS = {
    "afm-4.5b": Config(
        vocab=128_004, num_layers=36, dim=2560, mlp_dim=18_432, num_heads=20, num_kv_heads=4, head_dim=128,
        rope=Rope(128, 10_000.0, ops.YarnScaling(20.0, 4096), max_length=81_920),
    ),
}
# fmt: on

FAMILY = Family("arcee", Arcee, FIELDS, llama_table, PRESETS)
