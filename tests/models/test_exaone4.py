"""EXAONE 4 against transformers: windows with rotation, full layers without, and models without windows."""

from tests.models.conformance import BASE, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"


class TestExaone4(Conformance):
    family = "exaone4"
    config = "Exaone4Config"
    base = BASE
    cases = {
        "windowed": {"num_hidden_layers": 5, "sliding_window": 5, "vocab_size": 53},
        "tied_without_windows": {
            "sliding_window": None,
            "layer_types": [FULL] * 3,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    }
    windows = {"windowed": {5, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
