"""Qwen3.5 against transformers in float64, dense and with experts, and as part of a checkpoint that sees."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib.models import qwen3_5
from maxlib.ops import Rope
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, SEQ, Conformance
from tests.models.test_qwen3_next import DEFAULT, DELTA, EXPERTS

LINEAR, FULL = qwen3_5.LINEAR, qwen3_5.FULL
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
ROPE = DEFAULT | MROPE | {"partial_rotary_factor": 0.25}
SMALL = DELTA | {"head_dim": 16, "rope_parameters": ROPE}
KINDS = [LINEAR, LINEAR, FULL]


class TestQwen35(Conformance):
    family = "qwen3_5"
    config = "Qwen3_5TextConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | SMALL | {"linear_key_head_dim": 8}
    cases = {
        "one_to_one": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "vocab_size": 53},
        "three_to_one": {"num_hidden_layers": 5, "linear_conv_kernel_dim": 2},
        "two_widths_tied": {
            "layer_types": KINDS,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_key_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": DEFAULT | MROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "rope_parameters": ROPE | {"rope_theta": 5e5},
    }
    refused = Conformance.refused | {
        "attn_output_gate": False,
        "use_sliding_window": True,
        "mlp_only_layers": [1],
        "num_experts": 4,  # of the other model type
        "layer_types": [LINEAR],
    }
    elsewhere = {"layer_types"}  # other weights
    presets = {
        "qwen3.5-0.8b": 0.752,
        "qwen3.5-2b": 1.882,
        "qwen3.5-4b": 4.206,
        "qwen3.5-9b": 8.954,
        "qwen3.5-27b": 26.896,
        "qwen3.6-27b": 26.896,
        "qwen3.8-27b": 26.896,
        "qwen3.5-35b-a3b": 34.661,
        "qwen3.6-35b-a3b": 34.661,
        "qwen3.5-122b-a10b": 122.112,
        "qwen3.5-397b-a17b": 396.346,
    }
    windows = {
        "one_to_one": {SEQ, 3, 4},
        "three_to_one": {SEQ, 1, 4},
        "two_widths_tied": {SEQ, 2, 4},
    }  # convolution inputs, heads of states
    depths = (4, 8)


@pytest.mark.full
class TestQwen35MoE(TestQwen35):
    config = "Qwen3_5MoeTextConfig"
    base = {name: value for name, value in BASE.items() if name != "intermediate_size"} | SMALL | EXPERTS
    cases = {"experts": {"layer_types": KINDS, "linear_key_head_dim": 8}}
    matters = {"num_experts_per_tok": 2, "rms_norm_eps": 0.1}
    elsewhere = {"layer_types", "rope_parameters"}
    refused = {"norm_topk_prob": False, "decoder_sparse_step": 2, "hidden_act": "gelu"}
    windows = {"experts": {SEQ, 3, 4}}
    rules = Conformance.rules | {"expert": "data"}

    test_presets_have_the_published_size = None

    def test_released_files_have_all_experts_in_two_tensors(self, made, tmp_path):
        case, path, model = made("experts")
        tensors = load_file(path / "model.safetensors")
        for i in range(3):
            layer = f"model.layers.{i}.mlp.experts"
            one = lambda part, layer=layer: np.stack([tensors.pop(f"{layer}.{e}.{part}_proj.weight") for e in range(6)])
            tensors[f"{layer}.gate_up_proj"] = np.concatenate([one("gate"), one("up")], axis=1)
            tensors[f"{layer}.down_proj"] = one("down")
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(case["config"]))
        want = maxlib.nn.variables(model)
        for name, value in maxlib.nn.variables(maxlib.from_pretrained(tmp_path)).items():
            np.testing.assert_array_equal(value.get_value(), want[name].get_value())


def transformers_cases():
    return TestQwen35.transformers_cases() | TestQwen35MoE.transformers_cases()


def seeing(text: dict, **changes) -> dict:
    more = {"image_token_id": 50, "vision_start_token_id": 51, "vision_config": {"model_type": "qwen3_5", "depth": 2}}
    kind = text["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": text, "tie_word_embeddings": False} | more | changes


def test_a_checkpoint_that_sees_is_read_as_text(tmp_path):
    """Its text lies deeper, beside an encoder and a module that looks ahead."""
    case = parity.golden("qwen3_5")["one_to_one"]
    plain, path = parity.directory(tmp_path / "plain", case), tmp_path / "seeing"
    path.mkdir()
    tensors = {
        name.replace("model.", "model.language_model."): a for name, a in load_file(plain / "model.safetensors").items()
    }
    zeros = {name: np.zeros((2, 2), np.float32) for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight")}
    save_file(tensors | zeros, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(seeing(case["config"])))
    ours, theirs = maxlib.from_pretrained(path), maxlib.from_pretrained(plain)
    assert ours.cfg == theirs.cfg
    for name, value in maxlib.nn.variables(theirs).items():
        np.testing.assert_array_equal(maxlib.nn.variables(ours)[name].get_value(), value.get_value())


@pytest.mark.parametrize("config", ["Qwen3_5TextConfig", "Qwen3_5MoeTextConfig"])
def test_what_a_config_leaves_out_is_as_in_transformers(config):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, config)()
    short = {name: getattr(theirs, name) for name in ["model_type", *qwen3_5.Config.required()]}
    cfg = qwen3_5.Config.from_hf(HFConfig(short | {"max_position_embeddings": 32768}))
    assert cfg == qwen3_5.Config.from_hf(HFConfig(theirs.to_dict()))
    assert cfg.rope == Rope(64, max_length=32768)  # a quarter of a head


# What the config.json of the releases has in `text_config`.
COMMON = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE | {"rope_theta": 10000000},
    "vocab_size": 248320,
}
RELEASED = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 1024,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("preset", RELEASED)
def test_presets_are_what_the_releases_say(preset):
    text = COMMON | RELEASED[preset]
    text["layer_types"] = [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(text["num_hidden_layers"])]
    fields = HFConfig(seeing(text, tie_word_embeddings=text["tie_word_embeddings"]))
    assert qwen3_5.Config.from_hf(fields) == qwen3_5.PRESETS[preset]
    fields.done()
