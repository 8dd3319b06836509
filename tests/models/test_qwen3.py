"""Qwen3 against transformers: norms of queries and keys, wide heads, windows on some layers."""

from maxlib.models import qwen3
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, YARN, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 7}


class TestQwen3(Conformance):
    family = "qwen3"
    config = "Qwen3Config"
    base = BASE | {"head_dim": 10}
    cases = {
        "last_layers_windowed": WINDOW | {"num_hidden_layers": 4, "max_window_layers": 2, "vocab_size": 53},
        "tied_biases": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": YARN,
        },
    }
    windows = {"last_layers_windowed": {7, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused = {"use_sliding_window": False}


def test_heads_are_128_wide_unless_said():
    """Not dim / heads, which it is for every family before."""
    fields = HFConfig({"model_type": "qwen3"} | BASE)
    assert qwen3.FIELDS.read(fields).head_dim == 128
