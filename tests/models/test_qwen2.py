"""Qwen2 against transformers: biases, windows on some layers."""

import pytest

from maxlib.models import qwen2
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, YARN, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 4}


class TestQwen2(Conformance):
    family = "qwen2"
    config = "Qwen2Config"
    cases = {
        "last_layers_windowed": WINDOW | {"num_hidden_layers": 4, "max_window_layers": 2, "vocab_size": 53},
        "tied_in_turn": WINDOW
        | {
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL] * 2 + [SLIDING],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": YARN,
        },
    }
    windows = {"last_layers_windowed": {4, 24}, "tied_in_turn": {4, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused = {"use_sliding_window": False}


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 7},
        {"use_sliding_window": True, "max_window_layers": 9},
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 1, "layer_types": [SLIDING, FULL, SLIDING]},
    ],
    ids=str,
)
def test_layers_slide_where_they_do_in_transformers(fields):
    """Published configs name no layer_types: they follow from three other fields."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen2Config(**BASE | fields)
    ours = qwen2.FIELDS.read(HFConfig({"model_type": "qwen2"} | BASE | fields))
    assert list(ours.layer_types or [FULL] * 3) == theirs.layer_types
    assert ours.window == (theirs.sliding_window if SLIDING in theirs.layer_types else None)
