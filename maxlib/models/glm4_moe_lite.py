"""GLM-4.7-Flash (GLM team 2026): DeepSeek's latent attention, with the router and experts of GLM-4.5."""

from dataclasses import dataclass
from typing import Literal

from maxlib.models import deepseek
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """Sizes of a GLM-4.7-Flash; `PRESETS` has the published ones."""

    version: Literal[3] = 3  # the router and the experts are those of DeepSeek V3
    renormalize: bool = True
    routed_scale: float = 1.8
    norm_eps: float = 1e-5


class GLM4MoELite(deepseek.DeepSeek):
    """GLM-4.7-Flash: 30B parameters (3B active), with a cache of 576 numbers per token and layer."""


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
    fixed_if_present={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    absent={"q_rank": 768},
)


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

FAMILY = Family("glm4_moe_lite", GLM4MoELite, FIELDS, deepseek.FAMILY.table, PRESETS)
