"""dots.llm1 against transformers: groups of experts, dense first layers, windows on the upper layers."""

from tests.models.conformance import BASE, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}


class TestDots1(Conformance):
    family = "dots1"
    config = "Dots1Config"
    base = BASE | EXPERTS
    cases = {
        "upper_layers_slide": {
            "sliding_window": 5,
            "max_window_layers": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "vocab_size": 53,
        },
        "tied_biases": {
            "n_group": 3,
            "topk_group": 2,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    }
    rules = Conformance.rules | {"expert": "data"}
    windows = {"upper_layers_slide": {5, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL, FULL],
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    stated = {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3}
