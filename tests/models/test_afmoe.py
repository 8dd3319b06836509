"""AFMoE against transformers: gates, windows with rotation, full layers without, four norms, experts."""

from tests.models.conformance import BASE, SEQ, Conformance

SLIDING, FULL = "sliding_attention", "full_attention"


class TestAFMoE(Conformance):
    family = "afmoe"
    config = "AfmoeConfig"
    base = BASE | {
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 12,
        "route_scale": 1.7,
        "mup_enabled": True,
    }
    cases = {
        "scaled": {"vocab_size": 53},
        "unscaled_tied": {
            "num_hidden_layers": 5,
            "layer_types": None,
            "mup_enabled": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "num_shared_experts": 2,
            "num_dense_layers": 2,
        },
    }
    matters = {
        "mup_enabled": False,
        "route_scale": 1.0,
        "sliding_window": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    }
    refused = Conformance.refused | {"attention_bias": True, "score_func": "softmax", "n_group": 2}
    windows = {"scaled": {SEQ, 5}, "unscaled_tied": {SEQ, 5}}
    rules = Conformance.rules | {"expert": "data"}
