"""OLMo 1 against transformers: norms without weights, clipped queries, keys and values."""

from tests.models.conformance import BASE, Conformance

IDS = {"pad_token_id": None, "eos_token_id": None}  # transformers' own lie outside of this vocabulary


class TestOLMo(Conformance):
    family = "olmo"
    config = "OlmoConfig"
    base = BASE | IDS
    cases = {
        "clipped": {"clip_qkv": 0.7, "vocab_size": 53},
        "tied_biases": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    }
    matters = {"clip_qkv": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
