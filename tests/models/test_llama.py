"""Llama against transformers: live where torch installs, through golden arrays everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import nn, ops
from maxlib.models import llama
from tests.models import parity
from tests.models.conformance import BASE, Conformance

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
    **{
        kind: {
            "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields},
            "max_position_embeddings": limit,
            "tie_word_embeddings": kind == "yarn",
        }
        for kind, (fields, limit) in ROPES.items()
    },
}


class TestLlama(Conformance):
    family = "llama"
    config = "LlamaConfig"
    base = BASE | {"max_position_embeddings": 64}
    cases = CASES
    matters = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    gradients_by_default = True


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("linear", {"factor": 5.0}),
        ("dynamic", {"factor": 4.0}),
        ("llama3", {"factor": 4.0}),
        ("llama3", {"high_freq_factor": 2.0}),
        ("yarn", {"factor": 8.0}),
        ("longrope", {"long_factor": [2.0, 3.0, 8.0, 5.0]}),
    ],
    ids=str,
)
def test_every_field_matters(name, fields, tmp_path):
    case = parity.golden("llama")[name]
    rope = case["config"]["rope_parameters"]
    changes = {"rope_parameters": rope | fields} if "rms_norm_eps" not in fields else fields
    path = parity.directory(tmp_path, {**case, "config": case["config"] | changes})
    other = parity.logits(maxlib.from_pretrained(path), case["tokens"])
    assert np.abs(other - case["logits"]).max() > 1e-3 * case["logits"].std()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_of_transformers(dtype, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("llama")["gqa"]
    path = parity.directory(tmp_path / "hf", case)
    half = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    half.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    assert (tmp_path / "half/model.safetensors.index.json").exists()
    want = half.float().eval()(torch.from_numpy(case["tokens"]).long()).logits.detach().numpy()
    model = maxlib.from_pretrained(tmp_path / "half")
    assert {v.dtype for v in nn.partition(model)[0].values()} == {np.dtype(dtype)}
    assert np.abs(parity.logits(model, case["tokens"]) - want).max() < 1e-4 * want.std()


def test_ropes_that_hugging_face_does_not_have_are_refused():
    cfg = llama.PRESETS["llama3.2-1b"]
    for rope in (ops.Rope(64, interleaved=True, max_length=8), ops.Rope(32, max_length=8)):
        with pytest.raises(ValueError, match="turns whole heads in halves"):
            llama.FIELDS.write(dataclasses.replace(cfg, rope=rope))


def test_sequences_beyond_the_config_are_refused(tmp_path):
    case = parity.golden("llama")["gqa"]
    model = maxlib.from_pretrained(parity.directory(tmp_path / "hf", case))
    with pytest.raises(ValueError, match="at most 64 positions, got 65"):
        jax.eval_shape(model, jnp.zeros((1, 65), jnp.int32))
