"""Falcon against transformers: one key head, groups of heads, a norm for each layer or for each branch."""

from tests.models.conformance import BASE, Conformance

SIZES = {name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
IDS = {"bos_token_id": None, "eos_token_id": None}


class TestFalcon(Conformance):
    family = "falcon"
    config = "FalconConfig"
    base = SIZES | IDS | {"max_position_embeddings": 1024}
    cases = {
        "groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 44, "vocab_size": 53},
        "one_norm_untied_biases": {
            "new_decoder_architecture": True,
            "num_kv_heads": 1,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "bias": True,
        },
        "one_key_head": {},
        "heads_alike": {"multi_query": False},
    }
    matters = {"layer_norm_epsilon": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
