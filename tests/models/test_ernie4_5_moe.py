"""ERNIE 4.5 with experts against transformers: a bias of the choice, shared experts, layers without experts."""

from tests.models.conformance import BASE, Conformance


class TestErnie45MoE(Conformance):
    family = "ernie4_5_moe"
    config = "Ernie4_5_MoeConfig"
    base = BASE | {
        "pad_token_id": None,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 12,
        "moe_num_experts": 8,
        "moe_k": 3,
    }
    cases = {
        "shared": {"vocab_size": 53, "moe_layer_end_index": 2},
        "untied": {"tie_word_embeddings": False, "moe_num_shared_experts": 0, "moe_layer_interval": 2},
    }
    matters = {
        "rms_norm_eps": 0.1,
        "moe_k": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    refused = Conformance.refused | {"use_bias": True, "moe_norm_min": 0.1}
    rules = Conformance.rules | {"expert": "data"}
