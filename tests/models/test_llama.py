"""Llama against transformers: live where torch installs, through golden arrays everywhere."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, ops, sharding
from maxlib.models import llama
from maxlib.weights import HFConfig, read_model
from tests.models import parity

SEQ = 24
# Longer than the first training, so that every scaling has its effect.
ROPES = {
    "linear": ({"factor": 2.5}, 32),
    "dynamic": ({"factor": 2.0}, 16),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        64,
    ),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}, 64),
    "longrope": (
        {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        64,
    ),
}
CASES = {
    "gqa": {},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa_biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "odd_sizes": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 33,
        "head_dim": 10,
        "vocab_size": 53,
    },
    "heads_that_do_not_divide": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6},
    **{
        kind: {
            "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields},
            "max_position_embeddings": limit,
            "tie_word_embeddings": kind == "yarn",
        }
        for kind, (fields, limit) in ROPES.items()
    },
}
cases = pytest.mark.parametrize("name", CASES)


def transformers_cases():
    """What `parity.write` and the live test hand to transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    made = {}
    for name, changes in CASES.items():
        valid = base | changes | {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
        config = transformers.LlamaConfig(**valid)
        for field, value in (base | changes).items():  # set later, sizes that its constructor refuses are taken
            setattr(config, field, value)
        if "head_dim" not in changes:
            config.head_dim = config.hidden_size // config.num_attention_heads
        made[name] = (config, parity.tokens(config.vocab_size, SEQ))
    return made


@pytest.fixture(scope="module")
def live():
    return transformers_cases()


@cases
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    case = parity.golden("llama")[name]
    model = maxlib.from_pretrained(parity.directory(tmp_path / "hf", case))
    with pytest.warns(UserWarning, match="refuses") if name.startswith("heads_that") else contextlib.nullcontext():
        logits, gradients = parity.ours(model, case["tokens"], tmp_path / "gradients")
    assert np.abs(logits - case["logits"]).max() < 1e-4 * case["logits"].std()
    assert gradients.keys() == case["shapes"].keys()
    for tensor, gradient in gradients.items():
        norm, product = case["gradients"][tensor]
        ours = parity.projection(tensor, gradient)
        np.testing.assert_allclose(ours, [norm, product], rtol=0, atol=1e-4 * norm, err_msg=tensor)


@cases
def test_golden_arrays_are_what_transformers_gives(name, live):
    golden, now = parity.golden("llama")[name], parity.theirs(*live[name])
    assert golden["shapes"] == now["shapes"]
    np.testing.assert_allclose(now["logits"], golden["logits"], atol=1e-5 * golden["logits"].std(), rtol=1e-5)
    for tensor, value in now["gradients"].items():
        np.testing.assert_allclose(value, golden["gradients"][tensor], rtol=1e-3, atol=1e-5 * value[0])
