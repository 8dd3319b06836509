"""Qwen1.5-MoE and Qwen2-MoE (Qwen team 2024, arXiv:2407.10671): Qwen2's attention, many experts, and one large expert
with a gate of its own for every token.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention, gated_shared_experts
from maxlib.models._sizes import DECODER, MIXED, MixedSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(MixedSizes):
    """Sizes of a Qwen2 with experts; `PRESETS` has the published ones."""

    shared_dim: int
    num_experts: int = 60
    top_k: int = 4
    renormalize: bool = False
    qkv_bias: bool = True


class Block(PreNorm):
    """Qwen2's layer, with experts or with an MLP."""

    def __init__(self, cfg: Config, *, sparse: bool, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=cfg.qkv_bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = gated_shared_experts(cfg, rngs=rngs) if sparse else None


class Qwen2MoE(TextDecoder):
    """Qwen2 with experts: four or eight of about sixty small ones, and a shared one as wide as a dense MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda sparse, rngs: Block(cfg, sparse=sparse, rngs=rngs), cfg.sparse, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        *fields.EXPERTS,
        Field("shared_dim", "shared_expert_intermediate_size"),
        fields.rope(),
        *MIXED,
        Field("qkv_bias"),
    ],
    model_types={"qwen2_moe": "Qwen2MoeForCausalLM"},
    fixed={"hidden_act": "silu"},
    # With windows, transformers 4 and 5 disagree on which layers slide; no release has them.
    fixed_if_present={"layer_types": lambda c: ["full_attention"] * c.num_layers},
    ignored=("sliding_window", "max_window_layers"),  # of models with windows
    absent={"num_kv_heads": 16, "head_dim": fields.equal_heads, "expert_dim": 1408, "shared_dim": 5632},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (experts or an MLP) is passed over.
    experts = [*names.EXPERTS, *names.GATED_SHARED_EXPERT]
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *experts])


# fmt: off
_A2_7B = Config(
    vocab=151_936, num_layers=24, dim=2048, mlp_dim=5632, expert_dim=1408, shared_dim=5632, num_heads=16,
    num_kv_heads=16, head_dim=128, rope=Rope(128, 1_000_000.0, max_length=8192),
)
PRESETS = {
    "qwen1.5-moe-a2.7b": _A2_7B,
    "qwen2-57b-a14b": replace(
        _A2_7B, num_layers=28, dim=3584, mlp_dim=18_944, expert_dim=2560, shared_dim=20_480, num_heads=28,
        num_kv_heads=4, num_experts=64, top_k=8, rope=Rope(128, 1_000_000.0, max_length=131_072),
    ),
}
# fmt: on

FAMILY = Family("qwen2_moe", Qwen2MoE, FIELDS, _table, PRESETS)
