"""OLMo Hybrid against transformers: steps up to 2, norms before linear attention and after attention, no positions."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib.models.olmo_hybrid import FULL, LINEAR
from tests.models import parity
from tests.models.conformance import BASE, NO_TOKENS, SEQ, Conformance

# Heads of values are others than those of keys. All keys are as wide as all values: transformers writes the convolution
# in equal thirds, and its files are else not those of the release.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 6,
}
NOPE = {"rope_type": "default", "rope_theta": None}


class TestOLMoHybrid(Conformance):
    family = "olmo_hybrid"
    config = "OlmoHybridConfig"
    dtype = "float64"
    gradients = 1e-3  # what float32 differs by from float64 here
    base = BASE | NO_TOKENS | DELTA
    cases = {
        "in_turn": {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2, "rope_parameters": NOPE},
        "rotated_biases": {
            "layer_types": [LINEAR, LINEAR, FULL],
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 53,
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    windows = {"in_turn": {SEQ, 3, 4}, "rotated_biases": {SEQ, 2, 4}}  # inputs of the convolution, heads of states


def test_other_names_of_norms_are_read(tmp_path):
    """Those of transformers' modules, in place of those that it writes."""
    case = parity.golden("olmo_hybrid")["in_turn"]
    written = parity.directory(tmp_path / "written", case)
    tensors = load_file(written / "model.safetensors")
    other = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in other.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(case["config"]))
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    want, got = (parity.logits(maxlib.from_pretrained(path), case["tokens"]) for path in (written, tmp_path / "other"))
    np.testing.assert_array_equal(got, want)
