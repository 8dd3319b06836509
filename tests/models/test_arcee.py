"""Arcee against transformers: Llama with a squared ReLU."""

from tests.models.conformance import BASE, Conformance


class TestArcee(Conformance):
    family = "arcee"
    config = "ArceeConfig"
    base = BASE | dict.fromkeys(("bos_token_id", "eos_token_id"))
    cases = {
        "untied": {"vocab_size": 53},
        "tied_biases": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
        },
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    refused = {"hidden_act": "silu", "attn_logit_softcapping": 50.0}
