"""Kimi Linear against transformers: a decay for each channel, latent attention without positions, experts."""

import pytest

from maxlib.models import kimi_linear
from maxlib.models.kimi_linear import FULL, LINEAR
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, NO_TOKENS, Conformance

LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_key_value_heads": 4}
DELTA = {"linear_num_heads": 2, "linear_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_token": 3, "routed_scaling_factor": 1.7}


class TestKimiLinear(Conformance):
    family = "kimi_linear"
    config = "KimiLinearConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | NO_TOKENS | LATENT | DELTA | EXPERTS
    cases = {
        "in_turn": {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2},
        "groups": {
            "num_hidden_layers": 5,
            "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR],
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
            "q_lora_rank": 12,
            "linear_conv_kernel_dim": 3,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "vocab_size": 53,
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "moe_renormalize": False,
        "routed_scaling_factor": 1.0,
    }
    windows = {"in_turn": {3, 2}, "groups": {2}}  # inputs of the convolution, heads of states, rows of latents

    def test_both_spellings_are_read(self, name):
        """The release's: an object of its own for linear attention, whose layers count from 1."""
        config = parity.golden(self.family)[name]["config"]
        linear = {
            "full_attn_layers": [i + 1 for i, kind in enumerate(config["layer_types"]) if kind == FULL],
            "kda_layers": [i + 1 for i, kind in enumerate(config["layer_types"]) if kind == LINEAR],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        released = {k: v for k, v in config.items() if not k.startswith("linear_") and not k.endswith("layer_types")}
        released |= {
            "linear_attn_config": linear, "first_k_dense_replace": config["mlp_layer_types"].count("dense"),
            "mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "rope_scaling": None,
            "rope_theta": 10000.0, "use_grouped_topk": True, "num_nextn_predict_layers": 0,
        }  # fmt: skip
        now, before = HFConfig(config), HFConfig(released)
        assert kimi_linear.FIELDS.read(before) == kimi_linear.FIELDS.read(now)
        now.done()
        before.done()
        linear["kda_layers"] = linear["kda_layers"][1:]
        with pytest.raises(ValueError, match=r"linear_attn_config: .* must name each of the layers"):
            kimi_linear.FIELDS.read(HFConfig(released))
