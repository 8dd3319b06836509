"""SmolLM3 against transformers: layers without rotation, windows on them."""

import pytest

from maxlib.models import smollm3
from maxlib.weights import HFConfig
from tests.models import conformance
from tests.models.conformance import NO_TOKENS, YARN, Conformance

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = conformance.BASE | NO_TOKENS  # transformers' own lies outside of this vocabulary


class TestSmolLM3(Conformance):
    family = "smollm3"
    config = "SmolLM3Config"
    base = BASE
    cases = {
        "not_rotated_and_windowed": {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "vocab_size": 53,
        },
        "all_rotated_biases": {
            "no_rope_layers": [1, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": YARN,
        },
    }
    windows = {"not_rotated_and_windowed": {4, 24}}
    matters = {
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": [FULL, FULL, FULL, SLIDING],
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused = {"use_sliding_window": False, "no_rope_layers": [1, 0, 1]}


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 9},
        {"no_rope_layer_interval": 3, "num_hidden_layers": 7},
        {"no_rope_layers": [0, 1, 1, 0, 1]},  # more than there are layers
        {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 8},
        {"use_sliding_window": False, "sliding_window": 7, "num_hidden_layers": 8},
        {"use_sliding_window": True, "num_hidden_layers": 8},
    ],
    ids=str,
)
def test_layers_are_rotated_and_slide_where_they_do_in_transformers(fields):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.SmolLM3Config(**BASE | fields)
    ours = smollm3.FIELDS.read(HFConfig({"model_type": "smollm3"} | BASE | fields))
    layers = range(theirs.num_hidden_layers)
    assert [rope is not None for rope in ours.ropes] == [bool(theirs.no_rope_layers[i]) for i in layers]
    assert list(ours.layer_types or [FULL] * len(layers)) == theirs.layer_types
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
