"""Cohere against transformers: both generations, norms of heads, windows, layers without rotation."""

from tests.models.conformance import BASE, Conformance

IDS = dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id")
)  # transformers' own lie outside of this vocabulary


class TestCohere(Conformance):
    family = "cohere"
    config = "CohereConfig"
    base = BASE | IDS
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
    presets = {
        "command-r-35b": 34.981,
        "command-r-plus-104b": 103.811,
        "aya-23-8b": 8.028,
        "command-r7b": 8.028,
        "command-a-111b": 111.058,
    }


class TestCohere2(Conformance):
    family = "cohere"
    config = "Cohere2Config"
    base = BASE | IDS
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
    refused = Conformance.refused | {"use_qk_norm": True, "use_parallel_block": False}
    test_presets_have_the_published_size = None  # in TestCohere


def transformers_cases():
    return TestCohere.transformers_cases() | TestCohere2.transformers_cases()
