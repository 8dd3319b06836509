"""Qwen2 with experts against transformers: dense layers among sparse ones, a shared expert with a gate."""

from tests.models.conformance import BASE, Conformance

EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}


class TestQwen2MoE(Conformance):
    family = "qwen2_moe"
    config = "Qwen2MoeConfig"
    base = BASE | EXPERTS
    cases = {
        "dense_among_sparse": {
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "vocab_size": 53,
        },
        "tied_without_biases": {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    }
    rules = Conformance.rules | {"expert": "data"}
    matters = {
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
