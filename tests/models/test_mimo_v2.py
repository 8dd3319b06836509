"""MiMo-V2-Flash against transformers: windows with sinks and more key heads, values narrower than keys, and scaled."""

from maxlib.models.mimo_v2 import FULL, SLIDING
from tests.models.conformance import BASE, Conformance

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {
    FULL: PLAIN | {"rope_theta": 5e5, "partial_rotary_factor": 0.34},  # 4 of 12 dimensions
    SLIDING: PLAIN | {"partial_rotary_factor": 0.34},
}
OWN = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "head_dim": 12,
    "v_head_dim": 10,
    "rope_parameters": ROPES,
}


class TestMiMoV2(Conformance):
    family = "mimo_v2"
    config = "MiMoV2FlashConfig"
    base = BASE | OWN
    cases = {
        "windowed": {
            "num_hidden_layers": 4,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "sliding_window": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "vocab_size": 53,
        },
        "tied_biases": {
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
            "attention_value_scale": None,
        },
    }
    windows = {"windowed": {4, 24}, "tied_biases": {6, 24}}
    matters = {
        "sliding_window": 6,
        "attention_value_scale": 1.0,
        "n_group": 3,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 3.0,
        "rms_norm_eps": 0.1,
        "rope_parameters": ROPES | {SLIDING: ROPES[SLIDING] | {"rope_theta": 5e5}},
    }
    refused = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    rules = Conformance.rules | {"expert": "data"}
