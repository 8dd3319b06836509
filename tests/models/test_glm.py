"""Dense GLM-4 against transformers: half of each head rotated in pairs, norms after the branches and none."""

import pytest

from tests.models.conformance import BASE, Conformance

IDS = {"pad_token_id": None, "eos_token_id": [1]}  # transformers' own lie outside of this vocabulary
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.full  # by default its relative below is
class TestGLM(Conformance):
    family = "glm"
    config = "GlmConfig"
    base = BASE | IDS | {"head_dim": 12}
    cases = {
        "biases": {"vocab_size": 53},
        "tied": {"tie_word_embeddings": True, "attention_bias": False, "num_key_value_heads": 1, "head_dim": 8},
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}


class TestGLM0414(Conformance):
    family = "glm"
    config = "Glm4Config"
    base = BASE | IDS | {"head_dim": 12}
    cases = {
        "post_norms": {"attention_bias": False, "vocab_size": 53},
        "post_norms_tied_biases": {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8},
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
