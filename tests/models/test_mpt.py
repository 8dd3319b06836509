"""MPT against transformers: ALiBi, norms without biases, clipped queries, keys and values."""

from tests.models.conformance import Conformance


class TestMPT(Conformance):
    family = "mpt"
    config = "MptConfig"
    base = {"vocab_size": 61, "d_model": 32, "n_layers": 3, "n_heads": 4}
    cases = {
        "tied": {"attn_config": {"clip_qkv": 1.5}},
        "untied_six_heads": {"n_heads": 6, "d_model": 36, "tie_word_embeddings": False},
    }
    matters = {"layer_norm_epsilon": 0.1, "n_heads": 2, "attn_config.clip_qkv": 0.5}
    stated = {"attn_config": {}}
    test_both_spellings_are_read = None  # there is one
