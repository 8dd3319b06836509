"""DeepSeek V3.2 and GLM-5 against transformers: fewer keys than tokens, chosen by an indexer that is not trained."""

import pytest

from maxlib.models import deepseek_v32
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.latent_conformance import BASE, YARN, LatentConformance


class TestDeepSeekV32(LatentConformance):
    family = "deepseek_v32"
    config = "DeepseekV32Config"
    base = BASE | {
        "n_group": 4,
        "topk_group": 2,
        # Of so many heads hardly ever all are zero, where any choice would do.
        "index_n_heads": 16,
        "index_head_dim": 11,
        "index_topk": 7,
    }
    cases = {
        "groups": {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "vocab_size": 53,
        },
        "tied_scaled": {
            "first_k_dense_replace": 1,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "rope_parameters": YARN,
            "index_topk": 5,
        },
    }
    matters = LatentConformance.matters | {"index_topk": 6}


@pytest.mark.full
class TestGLM5(TestDeepSeekV32):
    config = "GlmMoeDsaConfig"
    base = TestDeepSeekV32.base | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    cases = {
        "glm": {"num_hidden_layers": 2, "vocab_size": 53},
        "glm_tied": {"tie_word_embeddings": True, "norm_topk_prob": False, "index_topk": 5},
        "glm_shared": {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "full", "shared"]},
    }
    matters = {
        name: value for name, value in TestDeepSeekV32.matters.items() if name not in ("n_group", "topk_group")
    } | {"n_group": 4}
    refused = {"mlp_layer_types": ["sparse", "dense"], "indexer_types": ["shared", "full"]}


def test_glm_in_its_older_spellings():
    """A pattern of letters, or every so many layers."""
    config = parity.golden("deepseek_v32")["glm"]["config"]
    want = deepseek_v32.FIELDS.read(HFConfig(config))
    del config["indexer_types"]
    for more in ({"index_topk_pattern": "FF"}, {"index_topk_freq": 1, "index_skip_topk_offset": 3}, {}):
        fields = HFConfig(config | more)
        assert deepseek_v32.FIELDS.read(fields) == want
        fields.done()
    deeper = config | {"num_hidden_layers": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 5}
    deeper["layer_types"] = ["indexed_attention"] * 6
    for more in ({"index_topk_pattern": "FFSFSF"}, {"index_topk_freq": 2, "index_skip_topk_offset": 2}):
        types = deepseek_v32.FIELDS.read(HFConfig(deeper | more)).index_types
        assert types == ("full", "full", "shared", "full", "shared", "full")
    with pytest.raises(ValueError, match="the first one 'full'"):
        deepseek_v32.FIELDS.read(HFConfig(config | {"index_topk_pattern": "SF"}))
