"""Qwen2-VL and Qwen2.5-VL against transformers: images of several shapes, windows, M-RoPE in sections, videos."""

import numpy as np
import pytest

import maxlib
from maxlib.models import qwen2_vl
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE
from tests.models.image_conformance import TOWER, VIDEO, ImageConformance

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = BASE | {"rope_parameters": ROPE, "bos_token_id": None, "eos_token_id": None}
SIZES = {name: value for name, value in TOWER.items() if name != "num_position_embeddings"}
# Windows of two by two squares of patches; images of three by two, one and two by three squares.
WINDOWED = SIZES | {"window_size": 16, "fullatt_block_indexes": [2, 5], "tokens_per_second": 3}
PLAIN = {"depth": 6, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}


class TestQwen25VL(ImageConformance):
    family = "qwen2_vl"
    config = "Qwen2_5_VLConfig"
    text_base = TEXT
    vision_base = WINDOWED
    cases = {
        "windows": {},
        "windows_tied": {
            "text": {"num_key_value_heads": 1, "vocab_size": 63},
            "vision": {"fullatt_block_indexes": [0], "window_size": 8},
            "tie_word_embeddings": True,
        },
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.rope_parameters": ROPE | {"mrope_section": [2, 1, 1]},
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "vision_config.window_size": 24,
        "vision_config.fullatt_block_indexes": [0, 3],
    }
    refused = {"text_config.rope_parameters.mrope_section": [1, 2, 2], "vision_config.window_size": 4}


@pytest.mark.full
class TestQwen2VL(ImageConformance):
    family = "qwen2_vl"
    config = "Qwen2VLConfig"
    text_base = TEXT
    vision_base = PLAIN
    cases = {"no_windows": {}}
    matters = {"text_config.rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
    refused = {"vision_config.embed_dim": 20}


@pytest.mark.parametrize("name", ["windows", "no_windows"])
def test_the_text_of_releases_is_at_the_top(name):
    """And their M-RoPE has a type of its own."""
    config = parity.golden("qwen2_vl")[name]["config"]
    text = {key: value for key, value in config["text_config"].items() if key in qwen2_vl.FLAT}
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    old = {key: value for key, value in config.items() if key != "text_config"} | text
    old["vision_config"] = old["vision_config"] | {"model_type": config["model_type"], "in_chans": 3}
    flat = HFConfig(old)
    assert qwen2_vl.FIELDS.read(flat) == qwen2_vl.FIELDS.read(HFConfig(config))
    flat.done()
    with pytest.raises(ValueError, match="unheard_of"):
        unknown = HFConfig(old | {"unheard_of": 1})
        qwen2_vl.FIELDS.read(unknown)
        unknown.done()


@pytest.mark.full
@pytest.mark.parametrize("name", ["windows", "no_windows"])
def test_a_video_has_time(name, tmp_path):
    """One that is wider than it is long: behind others, transformers 5 numbers text from the frame's larger side on, as
    if they had no time, and transformers 4, by which the models were trained, from the greatest position on.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = parity.directory(tmp_path, parity.golden("qwen2_vl")[name])
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    pixels = np.random.RandomState(3).standard_normal((96, 96)).astype(np.float32)  # three frames of 2 x 16 patches
    ids = parity.tokens(57, 30)[:1]
    ids[0, 3:27] = VIDEO
    with torch.no_grad():
        want = theirs(
            torch.from_numpy(ids).long(),
            pixel_values_videos=torch.from_numpy(pixels),
            video_grid_thw=torch.tensor([[3, 2, 16]]),
            mm_token_type_ids=2 * (torch.from_numpy(ids) == VIDEO).int(),
        ).logits.numpy()
    got = parity.logits(maxlib.from_pretrained(path), ids, maxlib.nn.vision.pad_patches(pixels, [[3, 2, 16]]))
    assert np.abs(got - want).max() < 1e-4 * want.std()
