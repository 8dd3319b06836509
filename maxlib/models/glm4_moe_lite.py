"""GLM-4.7-Flash (GLM team 2026): DeepSeek's latent attention, with the router and experts of GLM-4.5."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, deepseek_experts, latent_attention
from maxlib.models._sizes import ExpertSizes, LatentSizes, MTPSizes, mtp_table
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(LatentSizes, ExpertSizes, MTPSizes):
    """Sizes of a GLM-4.7-Flash; `PRESETS` has the published ones."""

    routed_scale: float = 1.8
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Pre-norm layer of latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = latent_attention(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class GLM4MoELite(TextDecoder):
    """GLM-4.7-Flash: 30B parameters of which a token uses 3B, with a cache of 576 numbers per token and layer."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)
        blocks = [Block(cfg, dense=False, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List([nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, rngs=rngs) for block in blocks])


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.num_dense(),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.MLA,
        fields.latent_rope(),
        fields.NUM_SHARED,
        *fields.GROUPS,
        fields.mtp(absent=0),
    ],
    model_types={"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    fixed={"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": fields.num_heads},
    fixed_if_present={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "mlp_bias": False, "moe_layer_freq": 1},
    absent={"q_rank": 768},
)


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    return mtp_table(cfg, layer)


# fmt: off
PRESETS = {
    "glm-4.7-flash": Config(
        vocab=154_880, num_layers=47, num_dense=1, dim=2048, mlp_dim=10_240, expert_dim=1536, num_heads=20,
        q_rank=768, kv_rank=512, nope_dim=192, v_dim=256,
        rope=Rope(64, 1_000_000.0, interleaved=True, max_length=202_752),
        num_experts=64, num_shared=1, top_k=4,
    )
}
# fmt: on

FAMILY = Family("glm4_moe_lite", GLM4MoELite, FIELDS, _table, PRESETS)
