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
    zero_gradients = r"k_proj\.bias$"  # of keys that are not rotated: all scores of a query grow alike
    test_both_spellings_are_read = None  # there is one
