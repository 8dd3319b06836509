"""GPT-2 against transformers: both ways to scale scores, tied and untied; names and fields as released; a limited
number of positions.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import maxlib
from maxlib import sharding
from maxlib.models import gpt2
from tests.models import parity
from tests.models.conformance import Conformance, assert_close
from tests.nn.tiny import filled

POSITIONS = 560


class TestGPT2(Conformance):
    family = "gpt2"
    gradients_by_default = True
    config = "GPT2Config"
    base = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
    cases = {
        "gpt2": {},
        "scaled_by_layer_untied": {
            "n_inner": 44,
            "n_head": 2,
            "vocab_size": 53,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "tie_word_embeddings": False,
        },
    }
    matters = {
        "n_head": 2,
        "layer_norm_epsilon": 0.1,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
    }
    refused = {"n_head": 5}
    test_both_spellings_are_read = None  # of rotary embeddings, which it has none of


@pytest.fixture(scope="module")
def case():
    return parity.golden("gpt2")["gpt2"]


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    return maxlib.from_pretrained(parity.directory(tmp_path_factory.mktemp("gpt2"), case))


def test_names_of_the_releases_are_read(case, model, tmp_path):
    """Without the prefix, with the causal mask of every layer, and with a copy of the tied head or not."""
    stored = {name.removeprefix("transformer."): value for name, value in parity.tensors(case["shapes"]).items()}
    for i in range(3):
        stored[f"h.{i}.attn.bias"] = np.tri(POSITIONS, dtype=np.float32)[None, None]
        stored[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    for head in ({}, {"lm_head.weight": stored["wte.weight"]}):
        save_file(stored | head, tmp_path / "model.safetensors")
        assert jax.tree.all(jax.tree.map(np.array_equal, maxlib.from_pretrained(tmp_path), model))


def test_a_sequence_over_devices_keeps_its_positions(case, model):
    layout = sharding.Layout(sharding.make_mesh(data=2, context=4), sharding.DP | sharding.CP_RING)
    spread = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = parity.logits(spread, case["tokens"])
    assert_close(got, case["logits"], 1e-4)


TINY = gpt2.Config(vocab=8, num_layers=3, dim=8, mlp_dim=8, num_heads=2, num_positions=16)


def test_equal_scales_are_scanned_and_others_stand_alone():
    for by_layer, grouping in ((False, ((1, 3),)), (True, ((3, 1),))):
        cfg = dataclasses.replace(TINY, scaled_by_layer=by_layer)
        assert jax.eval_shape(lambda cfg=cfg: gpt2.GPT2(cfg, rngs=nnx.Rngs(0))).layers.grouping == grouping


def test_positions_behind_the_table_are_errors():
    """Wherever their number is known; a packed row may be longer than the table, its documents may not."""
    model, tokens = filled(lambda: gpt2.GPT2(TINY, rngs=nnx.Rngs(0))), jnp.zeros((1, 20), jnp.int32)
    hidden = jax.jit(lambda model, tokens, **inputs: model(tokens, dtype=jnp.float32, **inputs).hidden)
    with pytest.raises(ValueError, match="16 learned positions, but 20 tokens"):
        hidden(model, tokens)
    model.init_cache(1, 16)
    with pytest.raises(ValueError, match="16 learned positions, but 17 tokens"):
        model.init_cache(1, 17)
    late = jnp.full((1, 20), 16, jnp.int32)
    with pytest.raises(ValueError, match="16 learned positions, but 17 tokens"):
        model(tokens, positions=late)
    assert np.isnan(hidden(model, tokens, positions=late)).all()
    assert np.isfinite(hidden(model, tokens, segment_ids=1 + jnp.arange(20)[None] // 10)).all()
