"""Qwen3 with experts against transformers: dense layers among sparse ones, expert weights with and without
renormalisation.
"""

import pytest

from maxlib.models import qwen3_moe
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, Conformance

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}
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
    refused = Conformance.refused | {
        "max_window_layers": 3,  # with a window
        "num_experts": 5,  # but num_local_experts says 6
        "shared_expert_intermediate_size": 12,
        "qkv_bias": True,
        "use_qk_norm": False,
        "mlp_bias": True,
    }
    presets = {
        "qwen3-30b-a3b": 30.532,
        "qwen3-30b-a3b-2507": 30.532,
        "qwen3-235b-a22b": 235.094,
        "qwen3-235b-a22b-2507": 235.094,
        "qwen3-coder-480b-a35b": 480.155,
    }


transformers_cases = TestQwen3MoE.transformers_cases


def test_dense_layers_stand_where_the_config_says():
    short = {"model_type": "qwen3_moe"} | BASE | EXPERTS | {"num_hidden_layers": 6}

    def layers(step, dense):
        return qwen3_moe.FIELDS.read(HFConfig(short | {"decoder_sparse_step": step, "mlp_only_layers": dense})).sparse

    assert layers(1, []) == (True,) * 6
    assert layers(1, [0, 4]) == (False, True, True, True, False, True)
    assert layers(3, []) == (False, False, True, False, False, True)
    assert layers(2, [1]) == (False, False, False, True, False, True)


def test_what_a_config_leaves_out_is_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3MoeConfig()
    short = {name: getattr(theirs, name) for name in ["model_type", *qwen3_moe.FIELDS.required]}
    cfg = qwen3_moe.FIELDS.read(HFConfig(short | {"max_position_embeddings": 32768}))
    assert cfg == qwen3_moe.FIELDS.read(HFConfig(theirs.to_dict()))
    assert cfg.head_dim == 64  # dim / heads, other than for the dense models


# What differs in the config.json of the releases, in the spelling of their time.
RELEASED = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "rope_theta": 1000000.0,
    },
    "qwen3-235b-a22b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 94,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
        "rope_theta": 1000000.0,
    },
    "qwen3-coder-480b-a35b": {
        "hidden_size": 6144,
        "intermediate_size": 8192,
        "max_position_embeddings": 262144,
        "max_window_layers": 62,
        "moe_intermediate_size": 2560,
        "num_attention_heads": 96,
        "num_experts": 160,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "qkv_bias": False,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
}
COMMON = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize("preset", RELEASED)
def test_presets_are_what_the_releases_say(preset):
    fields = HFConfig(COMMON | RELEASED[preset])
    assert qwen3_moe.FIELDS.read(fields) == qwen3_moe.PRESETS[preset]
    fields.done()
