"""ModernBERT against transformers: windows shorter than the sequence, biases, an untied head."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, ops
from maxlib.models import modernbert
from tests.models.conformance import BASE
from tests.models.encoder_decoder import EncoderConformance
from tests.nn.tiny import filled

IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)


class TestModernBert(EncoderConformance):
    family = "modernbert"
    config = "ModernBertConfig"
    base = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | IDS | {"local_attention": 8}
    cases = {
        "windows": {},
        "biases_untied": {
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 4,
        },
        "no_head_bias": {
            "decoder_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    }
    matters = {"norm_eps": 0.1, "local_attention": 12, "num_attention_heads": 2}
    test_both_spellings_are_read = None  # rope_parameters are nested by the type of layer


def test_means_of_long_documents_do_not_saturate_in_bfloat16():
    """Sums of more than a few hundred tokens would."""
    rope = ops.Rope(4)
    sizes = {"vocab": 9, "num_layers": 1, "dim": 8, "mlp_dim": 8, "num_heads": 2, "head_dim": 4, "rope": rope}
    cfg = modernbert.Config(**sizes, local_rope=rope, labels=("bad", "good"), pooling="mean")
    model, ctx = filled(lambda: modernbert.ModernBert(cfg, rngs=nnx.Rngs(0))), nn.make_context(1, 1000)
    x = jnp.asarray(np.random.default_rng(0).normal(1, 1, (1, 1000, 8)), jnp.bfloat16)
    leave = jax.jit(lambda model, x: model.leave(x, ctx)[:, 0])
    want = leave(model, x.astype(jnp.float32))
    np.testing.assert_allclose(leave(model, x), want, atol=0.03 * np.abs(want).max())
