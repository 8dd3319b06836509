"""GLM-4.5, 4.5-Air and 4.6 (GLM team 2025, arXiv:2508.06471): half of each head rotated, and DeepSeek V3's experts."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention, deepseek_experts
from maxlib.models._sizes import AttentionSizes, ExpertSizes, MTPSizes, mtp_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, ExpertSizes, MTPSizes):
    """Sizes of a GLM-4 with experts; `PRESETS` has the published ones."""

    norm_eps: float = 1e-5
    qk_norm: bool = False  # norm queries and keys head by head
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer; from the `num_dense`th on with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # The rope turns the first half of each head; the rest carries no position.
        self.attn = attention(cfg, rope=cfg.rope, qk_norm=cfg.qk_norm, bias=cfg.attention_bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class GLM4MoE(TextDecoder):
    """GLM-4 with experts: grouped-query attention under DeepSeek V3's experts, and modules that look ahead."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)
        blocks = [Block(cfg, dense=False, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List([nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, rngs=rngs) for block in blocks])


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.5),
        fields.NUM_SHARED,
        *fields.GROUPS,
        Field("qk_norm", "use_qk_norm"),
        fields.ATTENTION_BIAS,
        fields.mtp(absent=1),
    ],
    model_types={"glm4_moe": "Glm4MoeForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_dense": 1, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (norms of heads, biases, experts, an MLP) is passed over.
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE]
    return mtp_table(cfg, layer)


# fmt: off
_AIR = Config(
    vocab=151_552, num_layers=46, num_dense=1, dim=4096, mlp_dim=10_944, expert_dim=1408, num_heads=96, num_kv_heads=8,
    head_dim=128, rope=Rope(64, 1_000_000.0, max_length=131_072), num_experts=128, num_shared=1, top_k=8,
    attention_bias=True,
)
_355B = replace(
    _AIR, num_layers=92, num_dense=3, dim=5120, mlp_dim=12_288, expert_dim=1536, num_experts=160, routed_scale=2.5,
    qk_norm=True,
)
# fmt: on
PRESETS = {
    "glm-4.5-air": _AIR,
    "glm-4.5": _355B,
    "glm-4.6": replace(_355B, rope=Rope(64, 1_000_000.0, max_length=202_752)),
}

FAMILY = Family("glm4_moe", GLM4MoE, FIELDS, _table, PRESETS)
