"""GLM-5.3-Flash against transformers: bounded delta attention, pools of keys, streams, images of several shapes."""

import numpy as np
import pytest

from maxlib.models import glm5_next
from maxlib.models.glm5_next import INDEXED, LINEAR
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, _logits, assert_close
from tests.models.image_conformance import IMAGE, ImageConformance

TEXT = BASE | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    # Of so many heads hardly ever all are zero, where any choice would do; 8 of at most 24 keys are chosen.
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 8,
    "index_kpool": 4,
    "swiglu_limit": 1.0,
    "hc_mult": 3,
    "pad_token_id": None,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": [LINEAR, INDEXED, LINEAR, INDEXED],
}
TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "projection_intermediate_size": 28,
    "swiglu_limit": 1.0,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 59,
    "image_start_token_id": 57,
    "image_end_token_id": 58,
    "video_start_token_id": 55,
    "video_end_token_id": 56,
}


class TestGLM5Next(ImageConformance):
    family = "glm5_next"
    config = "Glm5NextConfig"
    dtype = "float64"
    gradients = 1e-3
    text_base = TEXT
    vision_base = TOWER
    ids = TOKENS
    offset = 0
    cases = {
        "in_turn": {},
        "wide_pools": {
            "text": {
                "layer_types": [LINEAR, LINEAR, LINEAR, INDEXED],
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "index_kpool": 2,
                "index_topk": 6,
                "hc_mult": 4,
                "hc_sinkhorn_iters": 3,
                "n_group": 4,
                "topk_group": 2,
                "n_shared_experts": 2,
                "linear_lower_bound": -2.0,
                "swiglu_limit": 10.0,
            },
            "vision": {"attention_bias": False, "swiglu_limit": 10.0},
        },
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.index_topk": 4,
        "text_config.routed_scaling_factor": 1.0,
        "text_config.linear_lower_bound": -1.0,
        "text_config.swiglu_limit": 0.5,
        "text_config.hc_sinkhorn_iters": 2,
        "text_config.hc_eps": 0.1,
        "vision_config.swiglu_limit": 0.5,
        "vision_config.rms_norm_eps": 0.1,
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
    refused = {"text_config.indexer_types": ["full", "full", "full", "shared"], "text_config.index_kpool": 3}

    @pytest.mark.full
    def test_left_padding_changes_nothing(self, name, exact):
        """Pools count from the first token, not from the first column."""
        case, _, model = exact(name)
        text = np.minimum(case["tokens"], 50)
        padded = np.pad(text, ((0, 0), (5, 0)))
        valid = np.broadcast_to(np.arange(padded.shape[1]) >= 5, padded.shape).astype(np.int32)
        assert_close(_logits(model, padded, valid)[:, 5:], _logits(model, text))


def test_the_spelling_of_a_release_is_read():
    """With an object of its own for linear attention, and "full_attention"."""
    config = parity.golden("glm5_next")["in_turn"]["config"]
    text = {k: v for k, v in config["text_config"].items() if not k.startswith("linear_")}
    text["linear_attn_config"] = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    text["layer_types"] = ["full_attention" if kind == INDEXED else kind for kind in text["layer_types"]]
    before, now = HFConfig(config | {"text_config": text}), HFConfig(config)
    assert glm5_next.FIELDS.read(before) == glm5_next.FIELDS.read(now)
    before.done()
    now.done()
