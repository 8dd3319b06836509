"""Phi-1 to Phi-2 against transformers: parallel branches, biases, also of the head, a part of each head rotated."""

from tests.models.conformance import Conformance

ROPE = {"rope_type": "default", "rope_theta": 1e4}


class TestPhi(Conformance):
    family = "phi"
    config = "PhiConfig"
    cases = {
        "half": {"num_key_value_heads": 4},
        "tied_one_key_head": {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 53,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {"layer_norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
    refused = {"hidden_act": "relu", "qk_layernorm": True, "attn_logit_softcapping": 50.0}
    presets = {"phi-1": 1.4183, "phi-1.5": 1.4183, "phi-2": 2.7797}


transformers_cases = TestPhi.transformers_cases
