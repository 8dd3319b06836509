"""OLMoE against transformers: norms over all heads, clipping, expert weights as they are and renormalized."""

from tests.models.conformance import BASE, Conformance

IDS = {"pad_token_id": None, "eos_token_id": None}  # transformers' own lie outside of this vocabulary


class TestOLMoE(Conformance):
    family = "olmoe"
    config = "OlmoeConfig"
    base = BASE | IDS | {"intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
    cases = {
        "clipped": {"clip_qkv": 0.7, "vocab_size": 53},
        "tied_biases": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "norm_topk_prob": True,
        },
    }
    rules = Conformance.rules | {"expert": "data"}
    matters = {
        "clip_qkv": 0.3,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
