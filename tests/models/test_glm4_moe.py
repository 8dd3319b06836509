"""GLM-4.5 against transformers: partial rotary embeddings, groups of experts, expert biases, with and without norms and
biases.
"""

import pytest

from tests.models import mtp
from tests.models.conformance import BASE, YARN, Conformance


class TestGLM4MoE(Conformance):
    family = "glm4_moe"
    config = "Glm4MoeConfig"
    stated = {"hidden_size": 768}
    base = BASE | {
        "moe_intermediate_size": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "head_dim": 12,
    }
    cases = {
        "groups_norms": {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": YARN,
            "vocab_size": 53,
        },
        "tied_biases": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    }
    matters = {
        "n_group": 3,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 3.0,
        "rms_norm_eps": 0.1,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.4},
    }
    rules = Conformance.rules | {"expert": "data"}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = TestGLM4MoE.base | {"use_qk_norm": True} | {"num_hidden_layers": 2, "num_mtp_layers": 2}
    return mtp.released(transformers.Glm4MoeConfig(**fields), tmp_path_factory.mktemp("mtp"))


@pytest.mark.full
def test_prediction_modules_are_those_of_transformers(modules):
    mtp.check_predictions(*modules)


@pytest.mark.full
def test_prediction_modules_are_left_out_unless_asked_for(modules, tmp_path):
    mtp.check_export(modules[-1], tmp_path)
