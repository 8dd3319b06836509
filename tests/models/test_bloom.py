"""BLOOM against transformers: ALiBi, with a number of heads that is a power of two or not."""

from tests.models.conformance import Conformance


class TestBloom(Conformance):
    family = "bloom"
    config = "BloomConfig"
    base = {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}
    cases = {"tied": {}, "untied_six_heads": {"n_head": 6, "hidden_size": 36, "tie_word_embeddings": False}}
    matters = {"layer_norm_epsilon": 0.1, "n_head": 2}

    test_both_spellings_are_read = None  # there is one
