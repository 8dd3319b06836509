"""Bamba against transformers: attention among Mamba-2, half of each head rotated, groups, biases."""

from tests.models.conformance import BASE, NO_TOKENS, SEQ, Conformance

SIZES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


class TestBamba(Conformance):
    family = "bamba"
    config = "BambaConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | SIZES | NO_TOKENS | {"rope_parameters": ROPE}
    cases = {
        "hybrid": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "vocab_size": 53},
        "tied_biases": {
            "attn_layer_indices": [2],
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "num_key_value_heads": 1,
            "time_step_limit": [0.3, 0.9],
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "time_step_limit": [0.5, 0.9],
        "rope_parameters": ROPE | {"rope_theta": 5e5},
    }
    refused = {"mamba_n_heads": 5}
    windows = {"hybrid": {SEQ, 3, 4}, "tied_biases": {SEQ, 2, 4}}
