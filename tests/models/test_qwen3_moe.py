"""Qwen3 with experts against transformers: dense layers among sparse ones, expert weights with and without
renormalisation.
"""

from maxlib.models import qwen3_moe
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, YARN, Conformance

EXPERTS = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}


class TestQwen3MoE(Conformance):
    family = "qwen3_moe"
    config = "Qwen3MoeConfig"
    base = BASE | EXPERTS | {"head_dim": 10}
    cases = {
        "dense_among_sparse": {
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "vocab_size": 53,
        },
        "tied_biases": {
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": YARN,
        },
    }
    rules = Conformance.rules | {"expert": "data"}
    windows = {"dense_among_sparse": {7}}
    matters = {
        "sliding_window": 6,
        "use_sliding_window": False,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }


def test_dense_layers_stand_where_the_config_says():
    short = {"model_type": "qwen3_moe"} | BASE | EXPERTS | {"num_hidden_layers": 6}

    def layers(step, dense):
        return qwen3_moe.FIELDS.read(HFConfig(short | {"decoder_sparse_step": step, "mlp_only_layers": dense})).sparse

    assert layers(1, []) == (True,) * 6
    assert layers(1, [0, 4]) == (False, True, True, True, False, True)
    assert layers(3, []) == (False, False, True, False, False, True)
    assert layers(2, [1]) == (False, False, False, True, False, True)
