"""GLM-4.1V against transformers: GLM-4 with M-RoPE in pairs, and images whose table of positions is resized."""

from tests.models.conformance import BASE
from tests.models.image_conformance import IMAGE, ImageConformance

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
TEXT = BASE | {"rope_parameters": ROPE, "pad_token_id": None}
TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 20,
    "out_hidden_size": 32,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 59,
    "image_start_token_id": 57,
    "image_end_token_id": 58,
    "video_start_token_id": 55,
    "video_end_token_id": 56,
}


class TestGLM4V(ImageConformance):
    family = "glm4v"
    config = "Glm4vConfig"
    text_base = TEXT
    vision_base = TOWER
    ids = TOKENS
    cases = {
        "images": {"vision": {"attention_bias": True}},
        "tied": {
            "text": {
                "num_key_value_heads": 1,
                "vocab_size": 63,
                "rope_parameters": ROPE | {"mrope_section": [0, 1, 1]},
            },
            "tie_word_embeddings": True,
        },
    }
    matters = {
        "text_config.rms_norm_eps": 0.1,
        "text_config.rope_parameters": ROPE | {"mrope_section": [0, 2, 0]},
        "vision_config.rms_norm_eps": 0.1,
        "vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
    refused = {"text_config.rope_parameters.mrope_section": [1, 2, 2], "vision_config.out_hidden_size": 24}
