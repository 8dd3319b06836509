"""Gemma 2 against transformers: alternating windows, both soft-caps, sandwich norms."""

from maxlib.models import gemma2
from tests.models.conformance import BASE, Conformance

LOCAL, GLOBAL = gemma2.SLIDING, gemma2.FULL


class TestGemma2(Conformance):
    family = "gemma2"
    config = "Gemma2Config"
    # transformers' embeddings give the padding token no gradient.
    base = BASE | {
        "head_dim": 12,
        "pad_token_id": None,
        "num_hidden_layers": 4,
        "sliding_window": 7,
    }
    cases = {
        "soft_caps": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        "no_soft_caps": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": [LOCAL, LOCAL, GLOBAL],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
        },
    }
    windows = {"soft_caps": {7, 24}, "no_soft_caps": {7, 24}}
    matters = {
        "sliding_window": 6,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
        "layer_types": [LOCAL] * 4,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
