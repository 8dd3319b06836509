"""LFM2 against transformers: short convolutions between attention, experts after dense layers, and old spellings."""

import pytest

from maxlib.models import lfm2
from maxlib.models.lfm2 import CONV, FULL
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, NO_TOKENS, SEQ, Conformance

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.full  # by default its relative below is
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
    windows = {"in_turn": {SEQ, 2}, "unadjusted_biases": {SEQ, 2}}  # slots, and rows of inputs of the convolution


class TestLFM2Experts(Conformance):
    family = "lfm2"
    test_what_a_config_leaves_out_is_as_in_transformers = None  # it must say what each layer is
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
    windows = {"experts": {SEQ, 2}, "unbiased_experts": {SEQ, 2}}


EXPERTS = {
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else CONV for i in range(24)],
}


def test_experts_without_layer_types_are_refused():
    short = {name: value for name, value in EXPERTS.items() if name != "layer_types"}
    with pytest.raises(ValueError, match="layer_types must be given"):
        lfm2.FIELDS.read(HFConfig(short))
