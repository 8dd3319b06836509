"""GLM-4.7-Flash against transformers: latent attention, rotated in pairs or halves, groups of experts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxlib
from maxlib.models import glm4_moe_lite
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import assert_close
from tests.models.latent_conformance import YARN, LatentConformance


class TestGLM4MoELite(LatentConformance):
    family = "glm4_moe_lite"
    config = "Glm4MoeLiteConfig"
    cases = {
        "groups": {
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "vocab_size": 53,
        },
        "halves_tied_scaled": {
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_parameters": YARN,
        },
    }
    matters = LatentConformance.matters | {"rope_interleave": False}


@pytest.mark.full
def test_the_prediction_module_is_that_of_deepseek(tmp_path):
    """With V3's, whose modules are compared with transformers', the weights have the same names."""
    case = parity.golden("glm4_moe_lite")["groups"]
    cfg = glm4_moe_lite.FIELDS.read(HFConfig(case["config"]))
    cfg = dataclasses.replace(cfg, num_mtp=1, norm_eps=1e-6, num_groups=1, top_groups=1)
    maxlib.save_pretrained(glm4_moe_lite.GLM4MoELite(cfg, rngs=nnx.Rngs(0)), tmp_path)
    ours = maxlib.from_pretrained(tmp_path, num_mtp=1)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mlp_layer_types"]
    config |= {"model_type": "deepseek_v3", "topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, tokens = maxlib.from_pretrained(tmp_path, num_mtp=1), jnp.asarray(case["tokens"])

    @jax.jit
    def ahead(model):
        hidden = model(tokens, dtype=jnp.float32).hidden
        (prediction,) = model.predict_ahead(hidden, tokens)
        return hidden, prediction.hidden

    for got, want in zip(ahead(ours), ahead(theirs), strict=True):
        assert_close(got, want)
