"""GPT-J against transformers: neighbours rotated, a part of each head, and a head with a bias."""

from tests.models.conformance import Conformance


class TestGPTJ(Conformance):
    family = "gptj"
    config = "GPTJConfig"
    base = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 1024, "rotary_dim": 4}
    cases = {"part": {"n_inner": 44}, "whole": {"rotary_dim": 8, "n_head": 2, "vocab_size": 53}}
    matters = {"rotary_dim": 6, "layer_norm_epsilon": 0.1, "n_head": 2}

    test_both_spellings_are_read = None  # there is one
