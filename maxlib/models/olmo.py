"""OLMo 1 (Groeneveld et al. 2024, arXiv:2402.00838): Llama with layer norms that have no weights."""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an OLMo 1; `PRESETS` has the published ones."""

    mlp_dim: int
    norm_eps: float = 1e-5  # always, no field of config.json
    clip: float | None = None  # the largest value of queries, keys and values
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer with norms without weights, and with clipped queries, keys and values."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm, clip = nn.norm.UnitLayerNorm(cfg.norm_eps), None if cfg.clip is None else nn.norm.Clip(cfg.clip)
        self.attn_norm = norm
        bias = cfg.attention_bias
        self.attn = attention(
            cfg, rope=cfg.rope, bias=bias, out_bias=bias, q_norm=clip, k_norm=clip, v_norm=clip, rngs=rngs
        )
        self.mlp_norm = norm
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class OLMo(TextDecoder):
    """OLMo 1: open weights, data and code; its norms only standardize."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.norm.UnitLayerNorm(cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.without(fields.DECODER, "norm_eps"),
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(),
        Field("clip", "clip_qkv"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"olmo": "OlmoForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": fields.num_heads},
)

# fmt: off
_7B = Config(
    vocab=50_304, num_layers=32, dim=4096, mlp_dim=11_008, num_heads=32, num_kv_heads=32, head_dim=128,
    rope=Rope(128, max_length=2048),
)
PRESETS = {
    "olmo-1b": replace(
        _7B, num_layers=16, dim=2048, mlp_dim=8192, num_heads=16, num_kv_heads=16, tied=True,
    ),
    "olmo-7b": _7B,
    "olmo-7b-0424": replace(_7B, rope=Rope(128, max_length=4096), clip=8.0),
}
# fmt: on

FAMILY = Family("olmo", OLMo, FIELDS, llama_table, PRESETS)
