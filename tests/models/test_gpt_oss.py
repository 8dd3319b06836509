"""GPT-OSS against transformers: sinks, biases, alternating windows, YaRN with untruncated bounds, the clamp."""

from maxlib.models.gpt_oss import FULL, SLIDING
from tests.models.conformance import BASE, Conformance

YARN = {  # whose ramp lies within the few pairs of a small head
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e3}


class TestGptOss(Conformance):
    family = "gpt_oss"
    config = "GptOssConfig"
    base = BASE | {
        "intermediate_size": 20,
        "num_hidden_layers": 4,
        "head_dim": 10,
        "sliding_window": 5,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": YARN,
    }
    cases = {
        "gpt_oss": {"swiglu_limit": 0.4},  # so small that it counts
        "gpt_oss_tied": {
            "num_hidden_layers": 3,
            "layer_types": [FULL, FULL, SLIDING],
            "num_key_value_heads": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 2,
            "rope_parameters": PLAIN,
        },
    }
    windows = {"gpt_oss": {5, 24}, "gpt_oss_tied": {5, 24}}
    matters = {
        "sliding_window": 6,
        "layer_types": [SLIDING] * 4,
        "num_experts_per_tok": 2,
        "swiglu_alpha": 1.0,
        "swiglu_limit": 0.6,
        "rms_norm_eps": 0.1,
        "rope_parameters": YARN | {"truncate": True},
    }
