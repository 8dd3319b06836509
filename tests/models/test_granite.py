"""Granite 3 and dense Granite 4 against transformers: four factors, fused projections, tied and not."""

from maxlib.models import granite
from maxlib.weights import HFConfig
from tests.models import conformance
from tests.models.conformance import Conformance

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}
FACTORED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 4.0,
}
MATTERS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "rms_norm_eps": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
BASE = conformance.BASE | FACTORED


class TestGranite(Conformance):
    family = "granite"
    config = "GraniteConfig"
    base = BASE
    cases = {
        "granite3": {"tie_word_embeddings": True},
        "granite3_untied_biases": {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "vocab_size": 53,
            "rope_parameters": YARN,
        },
    }
    matters = MATTERS
    refused = Conformance.refused | {"mlp_bias": True, "sliding_window": 4}
    presets = {
        "granite-3.0-2b": 2.534,
        "granite-3.0-8b": 8.171,
        "granite-4.0-1b": 1.632,
        "granite-4.0-micro": 3.403,
    }


class TestGranite4(Conformance):
    family = "granite"
    config = "GraniteMoeHybridConfig"
    base = BASE | {
        "layer_types": ["attention"] * 3,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 44,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    cases = {"granite4": {"tie_word_embeddings": True, "vocab_size": 53, "attention_bias": True}}
    matters = MATTERS
    # No layer reads them, or their value decides which weights there are.
    elsewhere = {*granite.Config.ignored, "shared_intermediate_size"}
    refused = Conformance.refused | {
        "layer_types": ["attention", "mamba", "attention"],
        "num_local_experts": 4,
        "position_embedding_type": "nope",
        "normalization_function": "layernorm",
    }
    test_presets_have_the_published_size = None  # in TestGranite
    test_every_field_of_the_shapes_matters = None  # the width of experts has no effect


def transformers_cases():
    return TestGranite.transformers_cases() | TestGranite4.transformers_cases()


# The config.json of Granite 4.0 1B.
RELEASED = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 4096,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 8,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 16,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}


def test_preset_is_what_the_release_says():
    fields = HFConfig(RELEASED)
    assert granite.Config.from_hf(fields) == granite.PRESETS["granite-4.0-1b"]
    fields.done()
