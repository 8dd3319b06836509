"""StableLM against transformers: sequential and parallel layers, norms of heads, a part of each head rotated."""

from tests.models.conformance import BASE, Conformance

ROPE = {"rope_type": "default", "rope_theta": 1e4}


class TestStableLM(Conformance):
    family = "stablelm"
    config = "StableLmConfig"
    base = BASE | {"num_attention_heads": 2}
    cases = {
        "sequential": {"use_qkv_bias": True, "vocab_size": 53},
        "parallel_head_norms_tied": {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "num_attention_heads": 4,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {"layer_norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
