"""T5Gemma against transformers: two sides of different sizes, windows shorter than both sequences."""

import pytest

from tests.models import parity
from tests.models.conformance import SEQ
from tests.models.encoder_decoder import EncoderDecoderConformance

SIDE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 1024,
    "sliding_window": 6,
    "query_pre_attn_scalar": 10,
}


class TestT5Gemma(EncoderDecoderConformance):
    family = "t5gemma"
    config = "T5GemmaConfig"
    cases = {"t5gemma": {}, "untied": {"tie_word_embeddings": False}}
    matters = {
        "encoder.sliding_window": 4,
        "decoder.sliding_window": 4,
        "decoder.query_pre_attn_scalar": 20,
        "encoder.attn_logit_softcapping": 1.0,
        "decoder.attn_logit_softcapping": 1.0,
        "decoder.final_logit_softcapping": 1.0,
    }

    @classmethod
    def transformers_cases(cls):
        """Both sides have a configuration of their own."""
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")
        cases = {}
        for name, changes in cls.cases.items():
            encoder = transformers.T5GemmaModuleConfig(**SIDE | {"hidden_size": 24, "num_hidden_layers": 2})
            decoder = transformers.T5GemmaModuleConfig(**SIDE)
            config = transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=61, **changes)
            cases[name] = (config, parity.tokens(61, SEQ), cls.dtype)
        return cases

    test_what_a_config_leaves_out_is_as_in_transformers = None  # it has no flat fields
