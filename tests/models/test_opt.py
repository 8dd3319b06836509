"""OPT against transformers: ReLU, and positions that begin in the third row of their table."""

from tests.models.conformance import Conformance


class TestOPT(Conformance):
    family = "opt"
    config = "OPTConfig"
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "ffn_dim": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
        "word_embed_proj_dim": 32,
        "pad_token_id": None,  # whose row gets no gradient there
    }
    cases = {"tied": {}, "untied": {"tie_word_embeddings": False, "vocab_size": 53}}
    matters = {"num_attention_heads": 2}
    refused = {
        "activation_function": "gelu",
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 16,
        "enable_bias": False,
        "_remove_final_layer_norm": True,
    }
    presets = {
        "opt-125m": 0.1252,
        "opt-1.3b": 1.3158,
        "opt-2.7b": 2.6516,
        "opt-6.7b": 6.6585,
        "opt-13b": 12.8535,
        "opt-30b": 29.9747,
        "opt-66b": 65.7182,
    }
    zero_gradients = r"k_proj\.bias$"  # of keys that are not rotated: all scores of a query grow alike
    test_both_spellings_are_read = None  # there is one


transformers_cases = TestOPT.transformers_cases
