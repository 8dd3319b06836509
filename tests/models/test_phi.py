"""Phi-1 to Phi-2 against transformers: parallel branches, biases, also of the head, a part of each head rotated."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn, ops
from maxlib.models import phi
from tests.models.conformance import Conformance
from tests.nn.tiny import filled

ROPE = {"rope_type": "default", "rope_theta": 1e4}


class TestPhi(Conformance):
    family = "phi"
    config = "PhiConfig"
    cases = {
        "half": {"num_key_value_heads": 4},
        "tied_one_key_head": {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 53,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    }
    matters = {"layer_norm_eps": 0.1, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}


def test_another_head_has_no_bias():
    """`hidden` ends with a one for the vocabulary's head only."""
    cfg = phi.Config(
        vocab=31, num_layers=1, dim=16, mlp_dim=24, num_heads=2, num_kv_heads=2, head_dim=8, rope=ops.Rope(4)
    )
    model, tokens = filled(lambda: phi.Phi(cfg, rngs=nnx.Rngs(0))), jnp.arange(6)[None]
    hidden = jax.eval_shape(lambda: model(tokens).hidden)
    assert hidden.shape == (1, 6, 17) and model.head_weight().shape == (31, 17)
    critic = nn.with_head(model, nn.ScoreHead(16, 1, rngs=nnx.Rngs(0)))
    assert jax.eval_shape(lambda: critic.logits(critic(tokens).hidden)).shape == (1, 6, 1)
    assert model.head_bias is not None
