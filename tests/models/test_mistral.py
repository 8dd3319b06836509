"""Mistral against transformers: with and without a window, heads wider than dim / heads, sharpened queries.

Its models that see are in `test_mistral_images`.
"""

import pytest

from maxlib.models import mistral
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, NO_TOKENS, YARN, Conformance


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


SHARPENED = YARN | {
    "original_max_position_embeddings": 5,  # positions of five lengths
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.8,
    "max_position_embeddings": 1024,
}


@pytest.mark.full  # by default its relative above is
class TestMinistral3(Conformance):
    family = "mistral"
    test_what_a_config_leaves_out_is_as_in_transformers = None  # it must say by how much queries are sharpened
    config = "Ministral3Config"
    base = BASE | {"head_dim": 10} | NO_TOKENS
    cases = {"ministral3": {"vocab_size": 53, "rope_parameters": SHARPENED}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": SHARPENED | {"llama_4_scaling_beta": 0.4},
    }
    refused = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}


def test_defaults_are_those_of_transformers():
    """The first release's config says nothing of the window in some copies: it is 4096 then. Null means none."""
    fields = {"model_type": "mistral", **BASE}
    assert mistral.FIELDS.read(HFConfig(fields)).window == 4096
    assert mistral.FIELDS.read(HFConfig({**fields, "sliding_window": None})).window is None
    assert mistral.FIELDS.read(HFConfig({**fields, "num_key_value_heads": None})).num_kv_heads == 4
    del fields["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads must be given"):
        mistral.FIELDS.read(HFConfig(fields))
