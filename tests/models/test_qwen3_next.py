"""Qwen3-Next against transformers in float64: linear attention between attention, experts between MLPs, slow decays."""

import pytest

from maxlib.models import qwen3_next
from maxlib.weights import HFConfig
from tests.models import parity, qwen_mtp
from tests.models.conformance import BASE, SEQ, Conformance

LINEAR, FULL = qwen3_next.LINEAR, qwen3_next.FULL
# Four value heads on two key heads, of other widths than in attention.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


class TestQwen3Next(Conformance):
    family = "qwen3_next"
    config = "Qwen3NextConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | DELTA | EXPERTS | {"head_dim": 16, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}}
    cases = {
        "one_to_one": {
            "num_hidden_layers": 2,
            "layer_types": [LINEAR, FULL],
            "mlp_only_layers": [1],
            "vocab_size": 53,
            "linear_key_head_dim": 8,
        },
        "three_to_one": {"num_hidden_layers": 4},
        "dense_among_sparse": {
            "num_hidden_layers": 5,
            "layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR],
            "mlp_only_layers": [1, 2],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "rms_norm_eps": 0.1,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    }
    rules = Conformance.rules | {"expert": "data"}
    windows = {
        "one_to_one": {SEQ, 3, 4},
        "three_to_one": {SEQ, 3, 4},
        "dense_among_sparse": {SEQ, 2, 4},
    }  # convolution inputs, heads of states


def test_layers_are_what_the_config_says():
    short = {"model_type": "qwen3_next"} | TestQwen3Next.base | {"num_hidden_layers": 6}
    kinds = lambda **fields: qwen3_next.FIELDS.read(HFConfig(short | fields)).kinds
    assert kinds() == tuple((kind, True) for kind in (LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR))
    assert kinds(full_attention_interval=3)[2] == (FULL, True)
    assert [sparse for _, sparse in kinds(decoder_sparse_step=2, mlp_only_layers=[1])] == [False] * 3 + [
        True,
        False,
        True,
    ]
    with pytest.raises(ValueError, match="full_attention_interval must be at least 1"):
        kinds(full_attention_interval=0)


@pytest.mark.full
@pytest.mark.parametrize("case", ["one_to_one", "three_to_one"])  # the first has an MLP in its last layer
def test_the_module_that_looks_ahead(case, tmp_path):
    golden = parity.golden("qwen3_next")[case]
    path, module = qwen_mtp.with_module(golden, tmp_path / "released")
    qwen_mtp.check_prediction(path, golden["config"], module, parity.tokens(golden["config"]["vocab_size"], SEQ))
    qwen_mtp.check_files(path, module, tmp_path)
    qwen_mtp.check_fused(path, module, 6, tmp_path)
    qwen_mtp.check_transformers_opens(tmp_path / "with")
