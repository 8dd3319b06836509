"""Kimi K2.5 against transformers: DeepSeek V3 with images of several shapes, whose table of positions is resized."""

import numpy as np

from maxlib.models import kimi_k25
from tests.models.image_conformance import TOKENS, ImageConformance
from tests.models.latent_conformance import BASE

TEXT = BASE | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
}


class TestKimiK25(ImageConformance):
    family = "kimi_k25"
    config = "Kimi_K25Config"
    text_base = TEXT
    vision_base = {
        "hidden_size": 24,
        "intermediate_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
    }
    ids = TOKENS | {"projection_hidden_size": 24, "tie_word_embeddings": False}
    cases = {"images": {}}
    matters = {
        "projection_layer_norm_eps": 0.1,
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 2.0},
        "text_config.rms_norm_eps": 0.1,
    }
    refused = {"vision_config.merge_kernel_size": [2, 1]}
    patch_dim = 48
    offset = 0
    slot_axis = -2
    rules = ImageConformance.rules | {"expert": "data"}


def test_patches_of_the_processor():
    """It cuts images row by row: `[rows, columns, channels, p, p]`."""
    vision, p, images = kimi_k25.Vision(), 14, [(4, 6), (2, 4)]
    pixels, cut = [], []
    for rows, columns in images:
        image = np.random.RandomState(rows).standard_normal((3, rows * p, columns * p)).astype(np.float32)
        pixels.append(image.reshape(3, rows, p, columns, p).transpose(1, 3, 0, 2, 4).reshape(-1, 3, p, p))
        cut.append(vision.cut(image)[0])
    grids = np.array([[1, *grid] for grid in images])
    got = vision.patches(np.concatenate(pixels), grids)
    np.testing.assert_array_equal(
        np.asarray(got.pixels).reshape(-1, 3 * p * p)[:32], np.concatenate(cut)
    )  # then padding
    np.testing.assert_array_equal(np.asarray(got.grids).reshape(-1, 3), grids)
