"""Mistral against transformers: with and without a window, heads wider than dim / heads, sharpened queries.

Its models that see are in `test_mistral_images`.
"""

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
        "pixtral-12b": 12.68,  # with an encoder of 0.4B, as all of the following that see
        "mistral-small-22b": 22.25,
        "mistral-small-24b": 23.57,
        "mistral-small-3.1-24b": 24.01,
        "mistral-small-3.2-24b": 24.01,
        "mistral-large-123b": 122.61,
        "ministral-3-3b": 3.85,
        "ministral-3-8b": 8.92,
        "ministral-3-14b": 13.95,
        "devstral-small-2-24b": 24.01,
    }


SHARPENED = YARN | {
    "original_max_position_embeddings": 5,  # positions of five lengths
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.8,
    "max_position_embeddings": 1024,
}


class TestMinistral3(Conformance):
    family = "mistral"
    test_what_a_config_leaves_out_is_as_in_transformers = None  # it must say by how much queries are sharpened
    config = "Ministral3Config"
    base = BASE | {"head_dim": 10} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    cases = {"ministral3": {"vocab_size": 53, "rope_parameters": SHARPENED}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": SHARPENED | {"llama_4_scaling_beta": 0.4},
    }
    refused = Conformance.refused | {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
    }
    test_presets_have_the_published_size = None  # in TestMistral


def transformers_cases():
    from tests.models import test_mistral_images  # which uses what is above

    cases = TestMistral.transformers_cases() | TestMinistral3.transformers_cases()
    return cases | test_mistral_images.transformers_cases()


def test_defaults_are_those_of_transformers():
    """The first release's config says nothing of the window in some copies: it is 4096 then. Null means none."""
    fields = {"model_type": "mistral", **BASE}
    assert mistral.FIELDS.read(HFConfig(fields)).window == 4096
    assert mistral.FIELDS.read(HFConfig({**fields, "sliding_window": None})).window is None
    assert mistral.FIELDS.read(HFConfig({**fields, "num_key_value_heads": None})).num_kv_heads == 4
    del fields["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads must be given"):
        mistral.FIELDS.read(HFConfig(fields))
