"""Granite 4 against transformers: Mamba-2 between attention, experts beside a shared MLP, dense models, slow decays."""

import dataclasses

import pytest

from maxlib.models import granite4
from maxlib.models.granite4 import FULL, MAMBA
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, SEQ, Conformance

FACTORED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 4.0,
}
# Heads of 16, and a state of another size.
SIZES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


class TestGranite4(Conformance):
    family = "granite4"
    config = "GraniteMoeHybridConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | FACTORED | SIZES | {"shared_intermediate_size": 20, "bos_token_id": None, "eos_token_id": None}
    base |= {"position_embedding_type": "nope", "rope_parameters": DEFAULT}
    cases = {
        "hybrid": {
            "num_hidden_layers": 4,
            "layer_types": [MAMBA, FULL] * 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        "rotated_biases": {
            "layer_types": [MAMBA, MAMBA, FULL],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "vocab_size": 53,
            "time_step_limit": [0.3, 0.9],
        },
        "dense": {
            "layer_types": [FULL] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    }
    matters = {
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "rms_norm_eps": 0.1,
        "position_embedding_type": "rope",
        "time_step_limit": [0.5, 0.6],
    }
    refused = {"mamba_n_heads": 5, "mamba_d_head": 8, "mamba_expand": 3}
    windows = {"hybrid": {SEQ, 3, 4}, "rotated_biases": {SEQ, 2, 4}}  # inputs of the convolution, heads of states
    rules = Conformance.rules | {"expert": "data"}


def test_both_names_of_layers_are_read():
    config = {"model_type": "granitemoehybrid"} | TestGranite4.base
    read = lambda *types: granite4.FIELDS.read(HFConfig(config | {"layer_types": list(types)})).layer_types
    assert read("linear_attention", "full_attention", "mamba") == (MAMBA, FULL, MAMBA) == read(MAMBA, FULL, MAMBA)
    assert granite4.FIELDS.read(HFConfig(config)).layer_types == (MAMBA,) * 3


def test_heads_of_mamba_have_a_whole_width():
    with pytest.raises(ValueError, match="mamba_heads must divide mamba_expand . dim = 128, got 48"):
        dataclasses.replace(granite4.PRESETS["granite-4.0-h-1b"], dim=64)
