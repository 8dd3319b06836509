"""GPT-NeoX against transformers: parallel and sequential branches, a part of each head rotated, both spellings."""

import jax
from flax import nnx

from maxlib.models import gpt_neox
from maxlib.weights import HFConfig
from tests.models.conformance import BASE, Conformance

ROPE = {"rope_type": "default", "rope_theta": 1e4}


class TestGPTNeoX(Conformance):
    family = "gpt_neox"
    config = "GPTNeoXConfig"
    base = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    cases = {
        "parallel": {"num_attention_heads": 2},
        "sequential": {
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "vocab_size": 53,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {
        "use_parallel_residual": False,
        "layer_norm_eps": 0.1,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "num_attention_heads": 4,
    }


def test_models_built_twice_have_one_structure():
    """So that parameters can be created sharded, and trees of two models joined."""
    cfg = gpt_neox.PRESETS["pythia-70m"]
    made = [jax.tree.structure(jax.eval_shape(lambda: gpt_neox.GPTNeoX(cfg, rngs=nnx.Rngs(0)))) for _ in range(2)]
    assert made[0] == made[1]


def test_names_of_the_releases_are_read():
    """Those of transformers 4, as in every release."""
    released = {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
    }
    config = HFConfig(released)
    assert gpt_neox.FIELDS.read(config) == gpt_neox.PRESETS["pythia-70m"]
    config.done()
