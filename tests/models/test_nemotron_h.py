"""Nemotron 3 against transformers: one mixer per layer, experts without gates in a latent width, groups of Mamba."""

import numpy as np
import pytest

import maxlib
from maxlib.models import nemotron_h
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, NO_TOKENS, SEQ, Conformance

MAMBA, EXPERTS, FULL, MLP = "linear_attention", "moe", "full_attention", "mlp"
SIZES = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 6,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "head_dim": 10,
    "time_step_min": 0.3,
}


class TestNemotronH(Conformance):
    family = "nemotron_h"
    test_what_a_config_leaves_out_is_as_in_transformers = None  # it must say what each layer is
    config = "NemotronHConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = {name: value for name, value in BASE.items() if name != "num_hidden_layers"} | SIZES | NO_TOKENS
    cases = {
        "latent": {
            "layers_block_type": [MAMBA, EXPERTS, FULL, EXPERTS] * 2,
            "moe_latent_size": 16,
            "routed_scaling_factor": 2.5,
        },
        "groups_biases": {
            "layers_block_type": [MAMBA, EXPERTS, MAMBA, MLP, FULL],
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
            "num_key_value_heads": 1,
            "vocab_size": 53,
        },
    }
    matters = {
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
        "layer_norm_epsilon": 0.1,
        "time_step_min": 0.8,
    }
    refused = {"layers_block_type": [MAMBA, "chunked"]}
    windows = {"latent": {SEQ, 3, 4}, "groups_biases": {SEQ, 2, 4}}

    # Nothing is rotated, so no spelling of a rope is older.
    test_both_spellings_are_read = None


@pytest.mark.full
def test_the_number_of_chosen_groups_matters(tmp_path):
    case = parity.golden("nemotron_h")["groups_biases"]

    def logits(groups):  # two experts, from so many groups of two
        changed = {**case, "config": {**case["config"], "topk_group": groups, "num_experts_per_tok": 2}}
        model = maxlib.from_pretrained(parity.directory(tmp_path / str(groups), changed))
        return parity.logits(model, case["tokens"])

    single, two = logits(1), logits(2)
    assert np.abs(single - two).max() > 1e-3 * two.std()


def test_names_and_letters_of_layers_are_read():
    written = nemotron_h.FIELDS.write(nemotron_h.PRESETS["nemotron-3-nano-30b-a3b"])
    read = lambda **fields: nemotron_h.FIELDS.read(HFConfig(written | fields)).pattern
    names = ["mamba", "moe", "attention", "mlp"]
    assert (
        read(layers_block_type=names, num_hidden_layers=4)
        == "ME*-"
        == read(layers_block_type=names, num_hidden_layers=None)
    )
    with pytest.raises(ValueError, match=r"must name each of num_hidden_layers.*got 'ME\*' for 4 layers"):
        read(hybrid_override_pattern="ME*", num_hidden_layers=4)
