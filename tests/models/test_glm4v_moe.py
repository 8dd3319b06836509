"""GLM-4.5V against transformers: GLM-4.1V with experts, and rotated halves."""

from tests.models.conformance import BASE
from tests.models.image_conformance import ImageConformance
from tests.models.test_glm4v import ROPE, TOKENS, TOWER


class TestGLM4VMoE(ImageConformance):
    family = "glm4v_moe"
    config = "Glm4vMoeConfig"
    text_base = BASE | {
        "rope_parameters": ROPE,
        "head_dim": 8,
        "pad_token_id": None,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
    }
    vision_base = TOWER
    ids = TOKENS
    cases = {"images": {"text": {"n_group": 4, "topk_group": 2}}}
    matters = {
        "text_config.routed_scaling_factor": 1.0,
        "text_config.num_experts_per_tok": 2,
        "text_config.rope_parameters": ROPE | {"mrope_section": [0, 2, 0]},
    }
    rules = ImageConformance.rules | {"expert": "data"}
