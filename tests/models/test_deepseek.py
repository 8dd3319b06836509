"""DeepSeek V2 and V3 against transformers: both routers with and without groups, queries with and without a latent,
YaRN.
"""

import pytest

from tests.models import mtp
from tests.models.conformance import Conformance

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}


class DeepSeek(Conformance):
    family = "deepseek"
    stated = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts_per_tok": 2}
    base = BASE
    rules = Conformance.rules | {"expert": "data"}
    slot_axis = -2


@pytest.mark.full  # by default its relative below is
class TestV2(DeepSeek):
    config = "DeepseekV2Config"
    cases = {
        "v2": {
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": YARN,
        },
        "v2_lite": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    }
    matters = {  # each field once, here or below
        "topk_group": 1,
        "topk_method": "greedy",
        "rms_norm_eps": 0.1,
        "rope_parameters": YARN | {"mscale_all_dim": 0.3},
    }


class TestV3(DeepSeek):
    config = "DeepseekV3Config"
    cases = {
        "v3": {
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 4,
            "rope_parameters": YARN,
        },
        "kimi": {
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    }
    matters = {
        "n_group": 3,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 3.0,
        "norm_topk_prob": False,
        "rope_interleave": False,
    }


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = TestV3.base | TestV3.cases["kimi"] | {"num_hidden_layers": 2, "num_mtp_layers": 2}
    return mtp.released(transformers.DeepseekV3Config(**fields), tmp_path_factory.mktemp("mtp"))


@pytest.mark.full
def test_prediction_modules_are_those_of_transformers(modules):
    mtp.check_predictions(*modules)


@pytest.mark.full
def test_prediction_modules_are_left_out_unless_asked_for(modules, tmp_path):
    mtp.check_export(modules[-1], tmp_path)
