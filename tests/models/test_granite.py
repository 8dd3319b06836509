"""Granite 3 against transformers: four multipliers, tied and untied."""

from tests.models import conformance
from tests.models.conformance import YARN, Conformance

FACTORED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 4.0,
}
MATTERS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "rms_norm_eps": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
BASE = conformance.BASE | FACTORED


class TestGranite(Conformance):
    family = "granite"
    config = "GraniteConfig"
    base = BASE
    cases = {
        "granite3": {"tie_word_embeddings": True},
        "granite3_untied_biases": {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "vocab_size": 53,
            "rope_parameters": YARN,
        },
    }
    matters = MATTERS
