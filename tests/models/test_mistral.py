"""Mistral against transformers: with and without a window, heads wider than dim / heads, sharpened queries, the text of
models that see.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib.models import mistral
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, Conformance, assert_close

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}


class TestMistral(Conformance):
    family = "mistral"
    config = "MistralConfig"
    cases = {
        "windowed": {"sliding_window": 4, "head_dim": 10, "vocab_size": 53},  # wider than dim / heads, as in Nemo
        "tied": {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": YARN,
        },
    }
    windows = {"windowed": {4}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    refused = Conformance.refused | {"attention_bias": True, "layer_types": ["sliding_attention"] * 3}
    presets = {
        "mistral-7b-v0.1": 7.24,
        "mistral-7b-v0.2": 7.24,
        "mistral-7b-v0.3": 7.25,
        "mistral-nemo-12b": 12.25,
        "mistral-small-22b": 22.25,
        "mistral-small-24b": 23.57,
        "mistral-small-3.1-24b": 23.57,
        "mistral-large-123b": 122.61,
        "ministral-3-3b": 3.43,  # 3.4B, 8.4B and 13.5B, beside an encoder of 0.4B
        "ministral-3-8b": 8.49,
        "ministral-3-14b": 13.51,
        "devstral-small-2-24b": 23.57,
    }


SHARPENED = YARN | {
    "original_max_position_embeddings": 5,  # positions of five lengths
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.8,
    "max_position_embeddings": 1024,
}


class TestMinistral3(Conformance):
    family = "mistral"
    config = "Ministral3Config"
    base = BASE | {"head_dim": 10} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    cases = {"ministral3": {"vocab_size": 53, "rope_parameters": SHARPENED}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "rope_parameters": SHARPENED | {"llama_4_scaling_beta": 0.4},
    }
    refused = Conformance.refused | {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
    }
    test_presets_have_the_published_size = None  # in TestMistral


def transformers_cases():
    return TestMistral.transformers_cases() | TestMinistral3.transformers_cases()


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_a_model_that_sees_is_refused_but_for_its_text(prefixes, tmp_path):
    """By the names of the releases, and by those of transformers 5."""
    case = parity.golden("mistral")["ministral3"]
    parity.directory(tmp_path, case)
    config = {
        "model_type": "mistral3",
        "text_config": case["config"],
        "vision_config": {"model_type": "pixtral", "hidden_size": 24},
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers, head = prefixes
    text = load_file(tmp_path / "model.safetensors")
    put = lambda name: layers + name.removeprefix("model.") if name.startswith("model.") else head + name
    images = {"vision_tower.ln_pre.weight": np.ones(24, np.float32)}
    save_file({put(name): value for name, value in text.items()} | images, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"image encoder.*pixtral.*tower=None"):
        maxlib.from_pretrained(tmp_path)
    model = maxlib.from_pretrained(tmp_path, tower=None)
    maxlib.save_pretrained(model, tmp_path / "text")
    assert load_file(tmp_path / "text" / "model.safetensors").keys() == text.keys()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ministral3", "mistral"])
def test_text_of_a_model_that_sees_is_that_of_transformers(kind, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    own = {"rope_parameters": SHARPENED} if kind == "ministral3" else {"sliding_window": None}
    text = TestMinistral3.base | own | {"model_type": kind}
    see = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    config = transformers.Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", **see}, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens = parity.tokens(61, 24) % 10  # no placeholder, which is 10
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert_close(parity.logits(maxlib.from_pretrained(tmp_path, tower=None), tokens), want, 1e-4)


# Of Ministral 3 8B, as its text_config ships.
RELEASED = {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "use_cache": True,
    "vocab_size": 131072,
}


def test_preset_is_what_the_release_says():
    fields = HFConfig(RELEASED)
    assert mistral.Config.from_hf(fields) == mistral.PRESETS["ministral-3-8b"]
    fields.done()


def test_defaults_are_those_of_transformers():
    """The first release's config says nothing of the window in some copies: it is 4096 then. Null means none."""
    fields = {"model_type": "mistral", **BASE}
    assert mistral.Config.from_hf(HFConfig(fields)).window == 4096
    assert mistral.Config.from_hf(HFConfig({**fields, "sliding_window": None})).window is None
    assert mistral.Config.from_hf(HFConfig({**fields, "num_key_value_heads": None})).num_kv_heads == 4
    del fields["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads must be given"):
        mistral.Config.from_hf(HFConfig(fields))
