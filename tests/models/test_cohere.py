"""Cohere against transformers: both generations, norms of heads, windows, layers without rotation."""

import pytest

from tests.models.conformance import BASE, NO_TOKENS, Conformance


@pytest.mark.full  # by default its relative below is
class TestCohere(Conformance):
    family = "cohere"
    config = "CohereConfig"
    base = BASE | NO_TOKENS
    cases = {
        "head_norms": {"use_qk_norm": True, "vocab_size": 53},
        "untied_biases": {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "logit_scale": 0.3,
        },
    }
    matters = {
        "logit_scale": 0.5,
        "layer_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }


class TestCohere2(Conformance):
    family = "cohere"
    config = "Cohere2Config"
    base = BASE | NO_TOKENS
    cases = {
        "windowed": {"num_hidden_layers": 5, "sliding_window": 5, "vocab_size": 53},
        "windowed_untied_biases": {
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 4,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    }
    windows = {"windowed": {5, 24}, "windowed_untied_biases": {4}}
    matters = {
        "sliding_window": 6,
        "logit_scale": 0.5,
        "layer_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
