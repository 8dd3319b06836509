"""GLM-4 9B and GLM-4-0414 (GLM team 2024, arXiv:2406.12793): Llama's block with half of each head rotated in
neighbouring pairs; the later models also norm the output of each branch.
"""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a dense GLM-4; `PRESETS` has the published ones."""

    mlp_dim: int
    post_norms: bool = False  # after each branch too
    attention_bias: bool = True  # of queries, keys and values
    norm_eps: float = 1.5625e-07


class Block(PreNorm):
    """Llama's layer, with norms after the branches in the later models."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=cfg.attention_bias, rngs=rngs)
        self.attn_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps) if cfg.post_norms else None
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps) if cfg.post_norms else None


class GLM(TextDecoder):
    """Dense GLM-4: two key heads, whatever the size."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(interleaved=True, partial=True, default_fraction=0.5),
        fields.ATTENTION_BIAS,
        Computed("post_norms", lambda hf, c: c.model_type == "glm4", lambda value, cfg: {}),
    ],
    model_types={"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"},
    model_type=lambda cfg: "glm4" if cfg.post_norms else "glm",
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": 2, "head_dim": 128},
)


def _table(cfg: Config) -> Table:
    norms = names.NORMS
    if cfg.post_norms:
        norms += (*names.norms(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),)
    mlp = [*names.gate_up("mlp.gate_up_proj", "mlp"), *names.linear("mlp.down_proj", "mlp.down")]
    return names.decoder_table([*norms, *names.ATTENTION, *mlp])


# fmt: off
_9B = Config(
    vocab=151_552, num_layers=40, dim=4096, mlp_dim=13_696, num_heads=32, num_kv_heads=2, head_dim=128,
    rope=Rope(64, 10_000.0, interleaved=True, max_length=8192),
)
PRESETS = {
    "glm-4-9b": _9B,
    "glm-4-9b-chat": replace(_9B, rope=replace(_9B.rope, max_length=131_072)),
    "glm-4-32b-0414": replace(
        _9B, num_layers=61, dim=6144, mlp_dim=23_040, num_heads=48, post_norms=True, attention_bias=False,
        norm_eps=1e-5, rope=replace(_9B.rope, max_length=32_768),
    ),
}
# fmt: on

FAMILY = Family("glm", GLM, FIELDS, _table, PRESETS)
