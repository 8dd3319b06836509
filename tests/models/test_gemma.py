"""Gemma against transformers."""

from maxlib.models import gemma
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, Conformance

# transformers' embeddings give the padding token no gradient.
TINY = BASE | {"head_dim": 12, "pad_token_id": None}


class TestGemma(Conformance):
    family = "gemma"
    config = "GemmaConfig"
    base = TINY
    cases = {
        "mha_untied_biases": {"num_key_value_heads": 4, "tie_word_embeddings": False, "attention_bias": True},
        "mqa": {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 53},
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def test_first_releases_are_read():
    """They name the exact gelu and mean its tanh approximation."""
    fields = HFConfig({"model_type": "gemma", **TINY, "hidden_act": "gelu", "hidden_activation": None})
    gemma.FIELDS.read(fields)
    fields.done()
