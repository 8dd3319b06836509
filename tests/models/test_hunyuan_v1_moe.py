"""Hunyuan with experts against transformers: norms after the rotation, and an expert for every token."""

from tests.models.conformance import BASE, Conformance


class TestHunyuanMoE(Conformance):
    family = "hunyuan_v1_moe"
    config = "HunYuanMoEV1Config"
    base = BASE | {
        "head_dim": 10,
        "pad_token_id": None,
        "num_experts": 8,
        "moe_topk": 3,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    }
    cases = {"stretched": {"vocab_size": 53}}
    matters = {"rms_norm_eps": 0.1, "moe_topk": 2, "rope_parameters.alpha": 2.0}
    refused = Conformance.refused | {"moe_topk": [1, 2, 3], "use_mixed_mlp_moe": False}
    rules = Conformance.rules | {"expert": "data"}
