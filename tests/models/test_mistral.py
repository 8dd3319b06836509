"""Mistral against transformers: with and without a window, heads wider than dim / heads."""

import pytest

from maxlib.models import mistral
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, Conformance

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}


class TestMistral(Conformance):
    family = "mistral"
    config = "MistralConfig"
    cases = {
        "windowed": {"sliding_window": 4, "head_dim": 10, "vocab_size": 53},  # wider than dim / heads, as in Nemo
        "tied": {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": YARN,
        },
    }
    windows = {"windowed": {4}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused = Conformance.refused | {"attention_bias": True, "layer_types": ["sliding_attention"] * 3}
    presets = {
        "mistral-7b-v0.1": 7.24,
        "mistral-7b-v0.2": 7.24,
        "mistral-7b-v0.3": 7.25,
        "mistral-nemo-12b": 12.25,
        "mistral-small-22b": 22.25,
        "mistral-small-24b": 23.57,
        "mistral-large-123b": 122.61,
    }


transformers_cases = TestMistral.transformers_cases


def test_defaults_are_those_of_transformers():
    """The first release's config says nothing of the window in some copies: it is 4096 then. Null means none."""
    fields = {"model_type": "mistral", **BASE}
    assert mistral.Config.from_hf(HFConfig(fields)).window == 4096
    assert mistral.Config.from_hf(HFConfig({**fields, "sliding_window": None})).window is None
    assert mistral.Config.from_hf(HFConfig({**fields, "num_key_value_heads": None})).num_kv_heads == 4
    del fields["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads must be given"):
        mistral.Config.from_hf(HFConfig(fields))
