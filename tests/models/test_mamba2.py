"""Mamba-2 against transformers: groups, biases, steps within limits, names of the first releases."""

from tests.models.conformance import NO_TOKENS, Conformance


class TestMamba2(Conformance):
    family = "mamba2"
    config = "Mamba2Config"
    dtype = "float64"
    recorded = "resid_post"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 6,
        "n_groups": 2,
        "chunk_size": 8,
        "residual_in_fp32": False,
        **NO_TOKENS,
    }
    cases = {
        "groups": {"vocab_size": 53, "time_step_limit": [0.3, 0.9]},
        "tied_biases": {
            "n_groups": 1,
            "tie_word_embeddings": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
        },
    }
    matters = {"layer_norm_epsilon": 0.1, "time_step_limit": [0.3, 0.5]}
    refused = {"num_heads": 5}
    windows = {"groups": {3, 4}, "tied_biases": {2, 4}}

    # Nothing is rotated, so no spelling of a rope is older.
    test_both_spellings_are_read = None
