"""Llama 4 against transformers: text. Images are in test_llama4_images.py."""

import pytest

import maxlib
from maxlib import sharding
from maxlib.models import llama4
from maxlib.models.llama4 import GLOBAL, LOCAL
from maxlib.weights import HFConfig
from tests.models import conformance, parity
from tests.models.conformance import Conformance, assert_close

# As Scout has it: all pairs on one side or the other of a single turn in 16 tokens.
STEP = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
BASE = conformance.BASE | {
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 4,
    "head_dim": 12,
    "attention_chunk_size": 5,
    "floor_scale": 3,
}


class TestLlama4(Conformance):
    family = "llama4"
    config = "Llama4TextConfig"
    base = BASE
    cases = {
        "scout": {"rope_parameters": STEP, "no_rope_layer_interval": 2, "vocab_size": 53},
        "all_rotated_biases_tied": {  # a bias of keys has no gradient where nothing is rotated
            "no_rope_layers": [1, 1],
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "scanned_and_swapped": {  # rotated layers see everything, the others their chunk
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": [GLOBAL, LOCAL, GLOBAL, LOCAL],
            "moe_layers": [1, 3],
            "attn_temperature_tuning": False,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
    }
    windows = {"scout": {5, 24}, "all_rotated_biases_tied": {5}, "scanned_and_swapped": {5, 24}}
    matters = {
        "attention_chunk_size": 6,
        "no_rope_layers": [1, 1],
        "layer_types": [LOCAL, LOCAL],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "floor_scale": 2,
        "attn_scale": 0.2,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": STEP | {"original_max_position_embeddings": 64},
    }
    refused = {"no_rope_layers": [1], "attention_chunk_size": None}


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 9},
        {"no_rope_layer_interval": 3, "num_hidden_layers": 7},
        {"no_rope_layers": [], "interleave_moe_layer_step": 2},
        {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0], "moe_layers": [0, 3]},
        {"moe_layers": []},
        {"layer_types": [GLOBAL] * 2, "interleave_moe_layer_step": 3},
    ],
    ids=str,
)
def test_layers_are_what_they_are_in_transformers(fields):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Llama4TextConfig(**BASE | fields)
    ours = llama4.FIELDS.read(HFConfig({"model_type": "llama4_text"} | BASE | fields))
    assert [int(kind.rotated) for kind in ours.layers] == theirs.no_rope_layers
    assert [kind.layer_type for kind in ours.layers] == theirs.layer_types
    assert [i for i, kind in enumerate(ours.layers) if kind.sparse] == theirs.moe_layers
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.full
def test_a_sequence_over_devices_equals_one_device(tmp_path):
    """Tokens stand in another order there; chunks and the temperature of queries go by their place in the text."""
    case = parity.golden("llama4")["scout"]
    directory, tokens = parity.directory(tmp_path, case), case["tokens"]
    layout = sharding.Layout(sharding.make_mesh(data=2, context=4), sharding.DP | sharding.CP_RING)
    model = maxlib.from_pretrained(directory, layout=layout)
    with sharding.use(layout):
        assert_close(parity.logits(model, tokens), case["logits"], 1e-4)
