"""CWM against transformers: windows in three layers of four, from the second on."""

from tests.models.conformance import BASE, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


class TestCWM(Conformance):
    family = "cwm"
    config = "CwmConfig"
    base = BASE | {"head_dim": 10, "sliding_window": 5, "bos_token_id": 1, "eos_token_id": 2}
    cases = {
        "usual": {"num_hidden_layers": 5, "vocab_size": 53},
        "tied": {
            "layer_types": [SLIDING, FULL, SLIDING],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": PLAIN,
        },
    }
    windows = {"usual": {5, 24}, "tied": {5, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [FULL, FULL, SLIDING, SLIDING, FULL],
        "rms_norm_eps": 0.1,
        "rope_parameters": PLAIN,
    }
    refused = Conformance.refused | {"mlp_bias": True}
    depths = (4, 8)
    presets = {"cwm-32b": 32.578}


transformers_cases = TestCWM.transformers_cases
