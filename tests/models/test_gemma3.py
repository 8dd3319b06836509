"""Gemma 3 against transformers: its text models."""

import jax
import pytest
from flax import nnx

from maxlib import nn
from maxlib.models import gemma3
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, Conformance

LOCAL, GLOBAL = gemma3.LOCAL, gemma3.GLOBAL
ROPES = {
    GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


class TestGemma3(Conformance):
    family = "gemma3"
    config = "Gemma3TextConfig"
    # transformers' embeddings give the padding token no gradient.
    base = BASE | {"head_dim": 12, "pad_token_id": None, "sliding_window": 7, "query_pre_attn_scalar": 20}
    cases = {
        "every_third_global": {
            "rope_parameters": ROPES,
            "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL],
            "num_hidden_layers": 4,
        },
        "global_first": {
            "num_hidden_layers": 2,
            "layer_types": [GLOBAL, LOCAL],
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "vocab_size": 53,
        },
    }
    windows = {"every_third_global": {7, 24}, "global_first": {7, 24}}
    matters = {
        "sliding_window": 6,
        "query_pre_attn_scalar": 12,
        "layer_types": [LOCAL] * 4,
        "use_bidirectional_attention": True,
        "rms_norm_eps": 0.1,
        "rope_parameters": ROPES | {GLOBAL: {"rope_type": "default", "rope_theta": 1e6}},
    }

    def test_both_spellings_are_read(self, name, made):
        case, _, model = made(name)
        config = {**case["config"]}
        ropes = config.pop("rope_parameters")
        old = {
            "rope_theta": ropes[GLOBAL]["rope_theta"],
            "rope_local_base_freq": ropes[LOCAL]["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0} if "factor" in ropes[GLOBAL] else None,
        }
        if name == "every_third_global":  # a pattern that one number can tell
            del config["layer_types"]
            old["sliding_window_pattern"] = 3
        fields = HFConfig(config | old)
        assert gemma3.FIELDS.read(fields) == model.cfg
        fields.done()


@pytest.mark.full
def test_every_sixth_layer_is_global_unless_said_otherwise():
    transformers = pytest.importorskip("transformers")
    for changes in ({}, {"sliding_window_pattern": 4}):
        theirs = transformers.Gemma3TextConfig(num_hidden_layers=13, **changes)
        fields = {"model_type": "gemma3_text", "num_hidden_layers": 13, **changes}
        assert list(gemma3.FIELDS.read(HFConfig(fields)).types) == theirs.layer_types


def test_what_released_configs_leave_out_is_as_in_transformers():
    """The config of the 4B model says no more than this of the text."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    fields = HFConfig({"model_type": "gemma3", "text_config": text, "vision_config": tower, "mm_tokens_per_image": 256})
    assert gemma3.FIELDS.read(fields) == gemma3.PRESETS["gemma3-4b"]
    fields.done()


def test_windows_keep_the_cache_small():
    """The 1B model at 8k tokens: under a quarter of what full caches hold."""
    cfg, length = gemma3.PRESETS["gemma3-1b"], 8192
    model = jax.eval_shape(lambda: gemma3.Gemma3(cfg, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: model.init_cache(1, length))
    full = 2 * cfg.num_layers * length * cfg.num_kv_heads * cfg.head_dim
    assert nn.num_parameters(cache.layers) < full / 4
