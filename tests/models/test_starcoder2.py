"""StarCoder 2 against transformers: LayerNorm, biases and none, windows."""

from tests.models.conformance import BASE, Conformance

IDS = dict.fromkeys(("bos_token_id", "eos_token_id"))  # transformers' own lie outside of this vocabulary


class TestStarCoder2(Conformance):
    family = "starcoder2"
    config = "Starcoder2Config"
    base = BASE | IDS
    cases = {
        "windowed": {"sliding_window": 5, "vocab_size": 53},
        "untied_without_biases": {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1},
    }
    windows = {"windowed": {5}}
    matters = {
        "sliding_window": 6,
        "norm_epsilon": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
