"""Apertus against transformers: an ungated MLP whose activation has trained parameters, norms on heads."""

from tests.models import conformance
from tests.models.conformance import NO_TOKENS, Conformance

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# transformers' embeddings give the padding token no gradient.
BASE = conformance.BASE | NO_TOKENS


class TestApertus(Conformance):
    family = "apertus"
    config = "ApertusConfig"
    base = BASE
    cases = {
        "scaled": {"vocab_size": 53, "rope_parameters": LLAMA3},
        "tied_biases": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": LLAMA3 | {"factor": 2.0}}
