"""ERNIE 4.5 against transformers: rotation in pairs, biases and none."""

from tests.models.conformance import BASE, Conformance


class TestErnie45(Conformance):
    family = "ernie4_5"
    config = "Ernie4_5Config"
    base = BASE | {"head_dim": 10, "pad_token_id": None}
    cases = {
        "tied": {"vocab_size": 53},
        "untied_biases": {"tie_word_embeddings": False, "use_bias": True, "num_key_value_heads": 1},
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
