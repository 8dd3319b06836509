"""MiniMax-M2 against transformers: norms over all heads, partial rotary embeddings, a bias on the choice of experts."""

from tests.models.conformance import BASE, YARN, Conformance


class TestMiniMaxM2(Conformance):
    family = "minimax_m2"
    config = "MiniMaxM2Config"
    base = {name: value for name, value in BASE.items() if name != "intermediate_size"} | {
        "intermediate_size": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    }
    cases = {
        "half_turned": {"head_dim": 12, "rotary_dim": 6, "vocab_size": 53},
        "tied": {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": YARN,
        },
    }
    matters = {
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    }
    refused = {"rotary_dim": 4}
    rules = Conformance.rules | {"expert": "data"}
