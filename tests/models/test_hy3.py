"""Hy3 against transformers: norms on heads, dense first layers, a bias on the choice of experts, shared ones."""

from tests.models.conformance import BASE, YARN, Conformance


class TestHy3(Conformance):
    family = "hy3"
    config = "HYV3Config"
    base = BASE | {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 10}
    cases = {
        "dense_first": {
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_shared_experts": 2,
            "vocab_size": 53,
        },
        "tied_biases": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": YARN,
        },
    }
    matters = {
        "num_experts_per_tok": 2,
        "router_scaling_factor": 1.0,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    }
    refused = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "first_k_dense_replace": 1}
    rules = Conformance.rules | {"expert": "data"}
