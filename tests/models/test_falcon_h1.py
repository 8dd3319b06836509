"""Falcon-H1 against transformers: both mixers in every layer, each factor of muP, both orders of norm and gate."""

import pytest

from maxlib.models import falcon_h1
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, NO_TOKENS, SEQ, Conformance

FACTORED = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 0.7, 1.3, 1.1, 0.6],
    "mlp_multipliers": [0.8, 1.2],
}
# Heads of 12 that together are not as wide as the model times a whole number, and a state of another size.
SIZES = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}


class TestFalconH1(Conformance):
    family = "falcon_h1"
    config = "FalconH1Config"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | FACTORED | SIZES | NO_TOKENS
    cases = {
        "normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "vocab_size": 53},
        "normed_first_biases": {
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "projectors_bias": True,
            "mlp_bias": True,
            "mamba_d_conv": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "time_step_limit": [0.3, 0.9],
        },
        "not_normed": {"mamba_n_groups": 1, "mamba_d_ssm": None, "head_dim": 10},
    }
    matters = {name: 0.5 for name in FACTORED if not name.endswith("multipliers")} | {
        "ssm_multipliers": [0.9, 0.7, 1.3, 1.1, 0.9],
        "mlp_multipliers": [0.8, 0.6],
        "mamba_norm_before_gate": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "time_step_limit": [0.5, 0.6],
    }
    refused = {"mamba_n_heads": 5, "mamba_d_head": 8, "ssm_multipliers": [1.0] * 4, "mlp_multipliers": [1.0]}
    # Slots, inputs of the convolution, heads of states.
    windows = {"normed": {SEQ, 3, 4}, "normed_first_biases": {SEQ, 2, 4}, "not_normed": {SEQ, 3, 4}}


def test_heads_that_do_not_fill_the_width_are_refused():
    written = falcon_h1.FIELDS.write(falcon_h1.PRESETS["falcon-h1-0.5b"])
    with pytest.raises(ValueError, match="mamba_n_heads times mamba_d_head must be 1536 .mamba_d_ssm"):
        falcon_h1.FIELDS.read(HFConfig(written | {"mamba_n_heads": 20}))
