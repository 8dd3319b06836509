"""ERNIE 4.5, dense (Baidu 2025): Llama whose heads are rotated in neighbouring pairs."""

from dataclasses import dataclass

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a dense ERNIE 4.5; `PRESETS` has the published ones."""

    mlp_dim: int
    bias: bool = False  # of all projections
    norm_eps: float = 1e-5
    tied: bool = True


class Block(PreNorm):
    """Llama's layer."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=cfg.bias, out_bias=cfg.bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, bias=cfg.bias, rngs=rngs)


class Ernie45(TextDecoder):
    """ERNIE 4.5 without experts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [*DECODER, fields.rope(interleaved=True, default_theta=500_000.0), Field("bias", "use_bias")],
    model_types={"ernie4_5": "Ernie4_5ForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": 2, "head_dim": 128},
)

# fmt: off
PRESETS = {
    "ernie-4.5-0.3b": Config(
        vocab=103_424, num_layers=18, dim=1024, mlp_dim=3072, num_heads=16, num_kv_heads=2, head_dim=128,
        rope=Rope(128, 500_000.0, interleaved=True, max_length=131_072),
    )
}
# fmt: on

FAMILY = Family("ernie4_5", Ernie45, FIELDS, llama_table, PRESETS)
