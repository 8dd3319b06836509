"""`Conformance` of families with latent attention and groups of experts: the sizes of DeepSeek V3 made small."""

from typing import ClassVar

from tests.models import conformance
from tests.models.conformance import Conformance

BASE = conformance.BASE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}
YARN = conformance.YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}


class LatentConformance(Conformance):
    base = BASE
    matters: ClassVar = {
        "n_group": 3,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 3.0,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused: ClassVar = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    rules = Conformance.rules | {"expert": "data"}
    slot_axis = -2  # [rows, slots, latent]
