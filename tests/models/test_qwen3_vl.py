"""Qwen3-VL against transformers, dense and with experts: images of several shapes, M-RoPE, and deepstack."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn
from maxlib.models import qwen3_vl
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE
from tests.models.image_conformance import TOWER, ImageConformance

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
TEXT = BASE | {"head_dim": 16, "num_hidden_layers": 5, "rope_parameters": ROPE}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


class TestQwen3VL(ImageConformance):
    family = "qwen3_vl"
    config = "Qwen3VLConfig"
    text_base = TEXT
    vision_base = TOWER | {"deepstack_visual_indexes": [1, 3]}
    cases = {
        "two_added": {},
        "three_added_tied_biases": {
            "text": {"attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3},
            "vision": {"deepstack_visual_indexes": [0, 2, 5], "num_position_embeddings": 9},
            "tie_word_embeddings": True,
        },
        "none_added_plain_head": {"text": {"num_key_value_heads": 4}, "vision": {"deepstack_visual_indexes": []}},
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.rope_parameters": ROPE | {"mrope_section": [6, 1, 1]},
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "vision_config.deepstack_visual_indexes": [0, 3],
    }
    refused = {
        "text_config.rope_parameters.mrope_section": [4, 2, 3],
        "vision_config.deepstack_visual_indexes": [3, 1],
        "vision_config.num_position_embeddings": 24,
    }

    @pytest.mark.full
    def test_three_positions_of_text_are_one(self, made):
        case, _, model = made("two_added")
        text = np.minimum(case["tokens"], 50)
        alike = np.broadcast_to(np.arange(text.shape[1])[None, :, None], (*text.shape, 3))
        got = parity._logits(model, text, {"positions": alike})
        np.testing.assert_allclose(got, parity.logits(model, text), rtol=0, atol=1e-6)


@pytest.mark.full
class TestQwen3VLMoE(TestQwen3VL):
    config = "Qwen3VLMoeConfig"
    text_base = TEXT | EXPERTS
    cases = {"experts": {"text": {"tie_word_embeddings": False}}}
    matters = {"text_config.num_experts_per_tok": 1}
    rules = ImageConformance.rules | {"expert": "data"}

    test_three_positions_of_text_are_one = None

    def test_experts_are_read_either_way(self, made, tmp_path):
        """Releases have them transposed, `E D 2F`; transformers writes `E 2F D`."""
        case, path, model = made("experts")
        assert case["shapes"]["model.language_model.layers.0.mlp.experts.gate_up_proj"] == [6, 32, 40]
        other = {
            name: np.ascontiguousarray(t.swapaxes(1, 2)) if ".experts." in name else t
            for name, t in load_file(path / "model.safetensors").items()
        }
        save_file(other, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        want = nn.variables(model)
        for name, value in nn.variables(maxlib.from_pretrained(tmp_path)).items():
            np.testing.assert_array_equal(value.get_value(), want[name].get_value())


def test_the_old_spelling_of_sections_is_read(tmp_path):
    config = parity.golden("qwen3_vl")["two_added"]["config"]
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    old = HFConfig(
        config | {"text_config": text, "vision_config": config["vision_config"] | {"model_type": "qwen3_vl"}}
    )
    assert qwen3_vl.FIELDS.read(old) == qwen3_vl.FIELDS.read(HFConfig(config))
    old.done()


def test_sections_must_fill_the_head(tmp_path):
    case = parity.golden("qwen3_vl")["two_added"]
    text = case["config"]["text_config"]
    for sections in ([4, 2, 3], [2, 6], [0, 4, 4]):
        changed = text | {"rope_parameters": ROPE | {"mrope_section": sections}}
        with pytest.raises(ValueError, match="mrope_section"):
            qwen3_vl.FIELDS.read(HFConfig(case["config"] | {"text_config": changed}))


@pytest.mark.full
def test_frames_of_a_video_are_images(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tests.models.image_conformance import VIDEO

    case = parity.golden("qwen3_vl")["two_added"]
    path = parity.directory(tmp_path, case)
    theirs = transformers.Qwen3VLForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    pixels = np.random.RandomState(3).standard_normal((16, 96)).astype(np.float32)  # two frames of 2 x 4 patches
    ids = parity.tokens(57, 12)[:1]
    ids[0, [3, 4, 7, 8]] = VIDEO
    with torch.no_grad():
        want = theirs(
            torch.from_numpy(ids).long(),
            pixel_values_videos=torch.from_numpy(pixels),
            video_grid_thw=torch.tensor([[2, 2, 4]]),
            mm_token_type_ids=2 * (torch.from_numpy(ids) == VIDEO).int(),
        ).logits.numpy()
    got = parity.logits(maxlib.from_pretrained(path), ids, maxlib.nn.vision.pad_patches(pixels, [[2, 2, 4]]))
    assert np.abs(got - want).max() < 1e-4 * want.std()


@pytest.mark.full
def test_patches_lie_as_the_processor_lays_them():
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = np.random.RandomState(4).randint(0, 256, (3, 64, 96)).astype(np.uint8)
    make = module.Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    want = make(images=[image], return_tensors="np")
    sees = qwen3_vl.PRESETS["qwen3-vl-2b"].vision
    pixels, grid = sees.cut(image.astype(np.float32) / 127.5 - 1)
    np.testing.assert_array_equal(grid, want["image_grid_thw"])
    np.testing.assert_allclose(pixels, want["pixel_values"], rtol=0, atol=1e-5)
