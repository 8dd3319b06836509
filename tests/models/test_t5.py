"""T5 against transformers: ReLU and a tied head, GeGLU as in v1.1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, training
from maxlib.training._batch_checks import check_first_batch
from maxlib.training._step import make_gradient
from tests.models import parity
from tests.models.encoder_decoder import EncoderDecoderConformance


class TestT5(EncoderDecoderConformance):
    family = "t5"
    config = "T5Config"
    gradients_by_default = True
    base = {
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 44,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,  # sequences are longer
        "decoder_start_token_id": 0,
    }
    cases = {"relu": {}, "gated": {"feed_forward_proj": "gated-gelu"}}
    matters = {"layer_norm_epsilon": 0.1, "relative_attention_max_distance": 30}

    @pytest.mark.full
    def test_training_reads_sources(self, made):
        """In one batch, in microbatches, and checked before the first step."""
        case, _, model = made("relu")
        tokens, source = jnp.asarray(case["tokens"]), parity.source(case)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "source": jax.tree.map(jnp.asarray, source)}
        losses = [
            make_gradient(training.NextToken(), dtype=jnp.float32, microbatches=count)(
                *nn.partition(model), batch, jax.random.key(0)
            )[1]
            for count in (1, 2)
        ]
        logits = jnp.asarray(case["logits"])[:, :-1]
        want = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        np.testing.assert_allclose(losses, [want, want], rtol=1e-4)
        with pytest.raises(ValueError, match="a row for each of the 2 rows"):
            check_first_batch(batch | {"source": nn.Source(source.tokens[:1])}, model)
