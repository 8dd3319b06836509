"""LFM2 against transformers: short convolutions between attention, experts after dense layers, and old spellings."""

import pytest

from maxlib.models import lfm2
from maxlib.models.lfm2 import CONV, FULL
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, SEQ, Conformance

# transformers gives the padding token's row no gradient.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


class TestLFM2(Conformance):
    family = "lfm2"
    config = "Lfm2Config"
    base = BASE | NO_TOKENS | {"rope_parameters": DEFAULT, "block_multiple_of": 8}
    cases = {
        "in_turn": {"num_hidden_layers": 4, "layer_types": [CONV, FULL] * 2},
        "unadjusted_biases": {
            "layer_types": [CONV, CONV, FULL],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "vocab_size": 53,
        },
    }
    matters = {"norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    refused = {"block_use_swiglu": False, "layer_types": [CONV, "chunked", CONV, FULL]}
    # They decide which weights there are, or of which shape.
    elsewhere = {
        *("layer_types", "full_attn_idxs", "conv_L_cache", "conv_bias"),
        *("block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
    }
    presets = {
        "lfm2-350m": 0.354,
        "lfm2-700m": 0.742,
        "lfm2-1.2b": 1.170,
        "lfm2-8b-a1b": 8.340,
        "lfm2.5-8b-a1b": 8.468,
    }
    windows = {"in_turn": {SEQ, 2}, "unadjusted_biases": {SEQ, 2}}  # slots, and rows of inputs of the convolution

    depths = None


class TestLFM2Experts(Conformance):
    family = "lfm2"
    config = "Lfm2MoeConfig"
    base = (
        BASE
        | NO_TOKENS
        | {"rope_parameters": DEFAULT, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
    )
    cases = {
        "experts": {"num_dense_layers": 1, "layer_types": [CONV, FULL, CONV], "routed_scaling_factor": 1.5},
        "unbiased_experts": {
            "num_dense_layers": 2,
            "num_hidden_layers": 5,
            "layer_types": [CONV, CONV, FULL, CONV, FULL],
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    }
    matters = TestLFM2.matters | {
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    }
    refused = {"layer_types": [CONV, "chunked", FULL]}
    elsewhere = {"layer_types", "conv_L_cache", "conv_bias", "num_dense_layers", "use_expert_bias"}
    presets = TestLFM2.presets
    windows = {"experts": {SEQ, 2}, "unbiased_experts": {SEQ, 2}}
    depths = None


def transformers_cases():
    return TestLFM2.transformers_cases() | TestLFM2Experts.transformers_cases()


# The config.json of LFM2-1.2B, and the layers of LFM2-8B-A1B.
RELEASED = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
EXPERTS = {
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else CONV for i in range(24)],
}


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({}, "lfm2-1.2b"),
        # Files that say both mean the second.
        ({"intermediate_size": 8192}, "lfm2-1.2b"),
        ({"hidden_size": 1536, "block_ff_dim": 10240, "num_attention_heads": 24}, "lfm2-700m"),
        ({"hidden_size": 1024, "block_ff_dim": 6656, "num_attention_heads": 16}, "lfm2-350m"),
        ({"block_auto_adjust_ff_dim": False, "block_ff_dim": 8192}, "lfm2-1.2b"),
        (EXPERTS, "lfm2-8b-a1b"),
    ],
)
def test_presets_are_what_releases_say(changes, preset):
    fields = HFConfig(changes if "layer_types" in changes else RELEASED | changes)
    assert lfm2.FIELDS.read(fields) == lfm2.PRESETS[preset]
    fields.done()


def test_experts_without_layer_types_are_refused():
    short = {name: value for name, value in EXPERTS.items() if name != "layer_types"}
    with pytest.raises(ValueError, match="layer_types must be given"):
        lfm2.FIELDS.read(HFConfig(short))
