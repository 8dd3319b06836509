"""Llama 4 against transformers: text. Images are in test_llama4_images.py."""

import copy

import pytest

import maxlib
from maxlib import sharding
from maxlib.models import llama4
from maxlib.models.llama4 import GLOBAL, LOCAL
from maxlib.weights import HFConfig
from tests.models import conformance, parity
from tests.models.conformance import Conformance, assert_close

# As Scout has it: all pairs on one side or the other of a single turn in 16 tokens.
STEP = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
BASE = conformance.BASE | {
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 4,
    "head_dim": 12,
    "attention_chunk_size": 5,
    "floor_scale": 3,
}


class TestLlama4(Conformance):
    family = "llama4"
    config = "Llama4TextConfig"
    base = BASE
    cases = {
        "scout": {"rope_parameters": STEP, "no_rope_layer_interval": 2, "vocab_size": 53},
        "all_rotated_biases_tied": {  # a bias of keys has no gradient where nothing is rotated
            "no_rope_layers": [1, 1],
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "scanned_and_swapped": {  # rotated layers see everything, the others their chunk
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": [GLOBAL, LOCAL, GLOBAL, LOCAL],
            "moe_layers": [1, 3],
            "attn_temperature_tuning": False,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
    }
    windows = {"scout": {5, 24}, "all_rotated_biases_tied": {5}, "scanned_and_swapped": {5, 24}}
    matters = {
        "attention_chunk_size": 6,
        "no_rope_layers": [1, 1],
        "layer_types": [LOCAL, LOCAL],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "floor_scale": 2,
        "attn_scale": 0.2,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": STEP | {"original_max_position_embeddings": 64},
    }
    refused = Conformance.refused | {
        "for_llm_compressor": True,
        "no_rope_layers": [1],  # for two layers
        "attention_chunk_size": None,
    }
    absent = {"intermediate_size_mlp"}  # the first case has experts in every layer
    # What Hugging Face counts in the released files, in billions.
    presets = {"llama4-17b-16e": 108.6418, "llama4-17b-128e": 401.5838}
    depths = (4, 8)


transformers_cases = TestLlama4.transformers_cases


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 9},
        {"no_rope_layer_interval": 3, "num_hidden_layers": 7},
        {"no_rope_layers": [], "interleave_moe_layer_step": 2},
        {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3]},
        {"moe_layers": []},
        {"layer_types": [GLOBAL] * 2, "interleave_moe_layer_step": 3},
    ],
    ids=str,
)
def test_layers_are_what_they_are_in_transformers(fields):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Llama4TextConfig(**BASE | fields)
    ours = llama4.FIELDS.read(HFConfig({"model_type": "llama4_text"} | BASE | fields))
    assert [int(kind.rotated) for kind in ours.layers] == theirs.no_rope_layers
    assert [kind.layer_type for kind in ours.layers] == theirs.layer_types
    assert [i for i, kind in enumerate(ours.layers) if kind.sparse] == theirs.moe_layers
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


# The fields of the released config.json files.
RELEASED_TEXT = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
RELEASED = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": RELEASED_TEXT,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    },
}
MAVERICK = {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama4-17b-16e", {}), ("llama4-17b-16e", {"attn_temperature_tuning": 4}), ("llama4-17b-128e", MAVERICK)],
)
def test_presets_are_the_released_configs(name, text):
    data = copy.deepcopy(RELEASED) | {"text_config": RELEASED_TEXT | text}
    fields = HFConfig(data)
    assert llama4.FIELDS.read(fields) == llama4.PRESETS[name]
    fields.done()


@pytest.mark.full
def test_a_sequence_over_devices_equals_one_device(tmp_path):
    """Tokens stand in another order there; chunks and the temperature of queries go by their place in the text."""
    case = parity.golden("llama4")["scout"]
    directory, tokens = parity.directory(tmp_path, case), case["tokens"]
    layout = sharding.Layout(sharding.make_mesh(data=2, context=4), sharding.DP | sharding.CP_RING)
    model = maxlib.from_pretrained(directory, layout=layout)
    with sharding.use(layout):
        assert_close(parity.logits(model, tokens), case["logits"], 1e-4)
