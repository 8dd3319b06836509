"""Qwen3.5 against transformers in float64, dense and with experts, of text and of images of several shapes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import inference, training
from maxlib.models import qwen3_5
from maxlib.weights import HFConfig
from tests.models import parity, qwen_mtp
from tests.models.conformance import BASE, SEQ, Conformance
from tests.models.image_conformance import ImageConformance
from tests.models.test_qwen3_next import DEFAULT, DELTA, EXPERTS

LINEAR, FULL = qwen3_5.LINEAR, qwen3_5.FULL
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
ROPE = DEFAULT | MROPE | {"partial_rotary_factor": 0.25}
SMALL = DELTA | {"head_dim": 16, "rope_parameters": ROPE}
KINDS = [LINEAR, LINEAR, FULL]


@pytest.mark.full  # by default its relative below is
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
    windows = {
        "one_to_one": {SEQ, 3, 4},
        "three_to_one": {SEQ, 1, 4},
        "two_widths_tied": {SEQ, 2, 4},
    }  # convolution inputs, heads of states


@pytest.mark.full
class TestQwen35MoE(TestQwen35):
    config = "Qwen3_5MoeTextConfig"
    base = {name: value for name, value in BASE.items() if name != "intermediate_size"} | SMALL | EXPERTS
    cases = {"experts": {"layer_types": KINDS, "linear_key_head_dim": 8}}
    matters = {"num_experts_per_tok": 2, "rms_norm_eps": 0.1}
    windows = {"experts": {SEQ, 3, 4}}
    rules = Conformance.rules | {"expert": "data"}

    def test_released_files_have_all_experts_in_two_tensors(self, made, tmp_path):
        case, path, model = made("experts")
        tensors = load_file(path / "model.safetensors")
        for i in range(3):
            layer = f"model.layers.{i}.mlp.experts"
            stacked = lambda part, layer=layer: np.stack(
                [tensors.pop(f"{layer}.{e}.{part}_proj.weight") for e in range(6)]
            )
            tensors[f"{layer}.gate_up_proj"] = np.concatenate([stacked("gate"), stacked("up")], axis=1)
            tensors[f"{layer}.down_proj"] = stacked("down")
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(case["config"]))
        want = maxlib.nn.variables(model)
        for name, value in maxlib.nn.variables(maxlib.from_pretrained(tmp_path)).items():
            np.testing.assert_array_equal(value.get_value(), want[name].get_value())


SECTIONS = DEFAULT | {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}


class TestQwen35Images(ImageConformance):
    family = "qwen3_5"
    config = "Qwen3_5Config"
    dtype = "float64"
    gradients = 1e-3  # as for text
    text_base = TestQwen35.base | {"rope_parameters": SECTIONS}
    cases = {
        "images": {"text": {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}},
        "images_tied": {
            "text": {"num_hidden_layers": 5, "tie_word_embeddings": True},
            "tie_word_embeddings": True,
        },
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.rope_parameters": SECTIONS | {"mrope_section": [3, 1, 0]},
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
    refused = {"text_config.rope_parameters.mrope_section": [1, 2, 1]}


@pytest.mark.full
class TestQwen35MoEImages(TestQwen35Images):
    config = "Qwen3_5MoeConfig"
    text_base = TestQwen35MoE.base | {"rope_parameters": SECTIONS}
    cases = {"images_experts": {"text": {"layer_types": KINDS, "linear_key_head_dim": 8}}}
    matters = {"text_config.num_experts_per_tok": 2}
    rules = ImageConformance.rules | {"expert": "data"}


def test_a_text_model_reads_a_checkpoint_that_sees(tmp_path):
    """Its text lies deeper, beside an encoder and a module that looks ahead."""
    case = parity.golden("qwen3_5")["images"]
    multimodal = maxlib.from_pretrained(
        parity.directory(tmp_path / "whole", case, **{"mtp.fc.weight": np.zeros((2, 2))})
    )
    text = dict(case["config"]["text_config"])
    parity.directory(tmp_path / "text", {**case, "config": text})
    blind = maxlib.from_pretrained(tmp_path / "text")
    assert blind.tower is None and multimodal.tower is not None
    with pytest.raises(ValueError, match="reads text only"):
        blind.check_inputs(case["tokens"], images=parity.images(case))
    for name, value in maxlib.nn.variables(blind).items():
        np.testing.assert_array_equal(maxlib.nn.variables(multimodal)[name].get_value(), value.get_value())


# --- the module that looks ahead ---

KIND = pytest.mark.parametrize(
    "case", ["one_to_one", *(pytest.param(name, marks=pytest.mark.full) for name in ("experts", "images"))]
)


@KIND
def test_the_module_predicts_as_the_formulas_say(case, tmp_path):
    golden = parity.golden("qwen3_5")[case]
    path, module = qwen_mtp.with_module(golden, tmp_path)
    tokens = parity.tokens(qwen_mtp.text_of(golden["config"])["vocab_size"] - 5, SEQ)  # without those of images
    qwen_mtp.check_prediction(path, golden["config"], module, tokens)


@KIND
def test_the_module_is_read_and_written_as_released(case, tmp_path):
    golden = parity.golden("qwen3_5")[case]
    path, module = qwen_mtp.with_module(golden, tmp_path / "released")
    qwen_mtp.check_files(path, module, tmp_path)
    stored = [
        qwen_mtp.text_of(json.loads((tmp_path / name / "config.json").read_text()))["mtp_num_hidden_layers"]
        for name in ("with", "without")
    ]
    assert stored == [1, 0]


@pytest.mark.full
def test_experts_of_the_module_are_read_either_way(tmp_path):
    path, module = qwen_mtp.with_module(parity.golden("qwen3_5")["experts"], tmp_path / "released")
    qwen_mtp.check_fused(path, module, 6, tmp_path)
    maxlib.save_pretrained(maxlib.from_pretrained(path, num_mtp=1), tmp_path / "export")
    qwen_mtp.check_transformers_opens(tmp_path / "export")


def small(*types: str, sees: bool = False) -> qwen3_5.Qwen35:
    cfg = qwen3_5.FIELDS.read(HFConfig(parity.golden("qwen3_5")["images"]["config"]))
    cfg = dataclasses.replace(cfg, num_layers=len(types), layer_types=types, num_mtp=1, tied=True)
    return qwen3_5.Qwen35(cfg if sees else dataclasses.replace(cfg, vision=None), rngs=nnx.Rngs(0))


def test_a_refused_draft_cannot_be_taken_back_from_a_state(tmp_path):
    path, _ = qwen_mtp.with_module(parity.golden("qwen3_5")["one_to_one"], tmp_path)
    model = maxlib.from_pretrained(path, num_mtp=1)
    with pytest.raises(ValueError, match="only keep a state .*StateCache.* cannot be removed"):
        inference.LocalEngine(model, num_drafts=1, drafter="mtp")


@pytest.mark.full
def test_without_states_the_module_drafts():
    model = small(FULL, FULL, sees=True)
    # Hidden states of a random model vary little: larger embeddings make the texts differ.
    model.embed.w[...] = 20 * model.embed.w[...]
    engine = inference.LocalEngine(model, num_drafts=1, drafter="mtp", dtype=jnp.float32)
    prompts, image = [[1, 2, 3], [4, 9, 1, 7, 2]], model.cfg.vision.image_token
    groups = engine.generate(prompts, max_new_tokens=12)
    assert [completion.tokens for (completion,) in groups] == engine.generator.generate(prompts, max_new_tokens=12)
    with pytest.raises(ValueError, match="1 image placeholders, but the given images make 0"):
        engine.generate([[1, image, 3]], max_new_tokens=2)


def test_the_module_reads_text_only():
    case, model = parity.golden("qwen3_5")["images"], jax.eval_shape(lambda: small(LINEAR, FULL, sees=True))
    batch = {"tokens": case["tokens"], "targets": case["tokens"], "images": parity.images(case)}
    batch = jax.tree.map(jnp.asarray, batch)
    with pytest.raises(ValueError, match="this batch has images: train with NextToken"):
        jax.eval_shape(lambda model: training.MTP()(model, batch), model)
