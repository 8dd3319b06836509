"""Hunyuan dense against transformers: norms after the rotation, whose base a fixed factor stretches."""

from tests.models.conformance import BASE, Conformance


class TestHunyuan(Conformance):
    family = "hunyuan_v1_dense"
    config = "HunYuanDenseV1Config"
    base = BASE | {"head_dim": 10, "pad_token_id": None}
    cases = {
        "stretched": {
            "vocab_size": 53,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
        "tied_biases": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    matters = {"rms_norm_eps": 0.1, "rope_parameters.alpha": 2.0}
    refused = Conformance.refused | {"use_qk_norm": False, "use_cla": True, "num_experts": 4}
