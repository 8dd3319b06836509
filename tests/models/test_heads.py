"""Models with heads of numbers: scores and gradients of transformers' classifiers, read from and written to files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import maxlib
from maxlib import nn, ops, training
from maxlib.models import llama
from tests.nn.tiny import filled_llama

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOKENS = np.random.default_rng(0).integers(1, 61, (3, 9)).astype(np.int32)
TOKENS[1, 6:] = TOKENS[2, 4:] = 0  # padding
VALID = TOKENS > 0
full = pytest.mark.full


def theirs(config: str, labels: int, directory, kind: str = "Sequence", **changes):
    """Writes a classifier of transformers with random weights."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**(SIZES | changes), num_labels=labels)
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(made).eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def scores(model, tokens=TOKENS, valid=VALID):
    """Returns the scores of each token."""
    return model.logits(model(jnp.asarray(tokens), valid=jnp.asarray(valid), dtype=jnp.float32).hidden)


def last(x):
    return nn.pool(x, "last", valid=jnp.asarray(VALID))[:, 0]


CONFIGS = [
    pytest.param("Qwen3Config", {}, id="qwen3", marks=full),
    pytest.param("Gemma3TextConfig", {"sliding_window": 4}, id="gemma3"),
    pytest.param("LlamaConfig", {}, id="llama", marks=full),
    pytest.param("Qwen2Config", {}, id="qwen2", marks=full),
    pytest.param("MistralConfig", {"sliding_window": None}, id="mistral", marks=full),
    pytest.param("GemmaConfig", {}, id="gemma", marks=full),
    pytest.param("Gemma2Config", {"sliding_window": 4, "final_logit_softcapping": 3.0}, id="gemma2", marks=full),
]


@pytest.mark.parametrize("config, changes", CONFIGS)
def test_scores_gradients_and_files_are_those_of_transformers(config, changes, tmp_path):
    model = theirs(config, 3, tmp_path / "theirs", **changes)
    wanted = model(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits
    (wanted**2).sum().backward()
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    params, rest = nn.partition(ours)

    def total(params):
        logits = last(scores(nn.combine(params, rest)))
        return jnp.sum(logits**2), logits

    grads, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    np.testing.assert_allclose(logits, wanted.detach(), rtol=1e-5, atol=1e-5)
    for path, weight in (("head.w", model.score.weight), ("embed.w", model.model.embed_tokens.weight)):
        np.testing.assert_allclose(grads[path], weight.grad, rtol=1e-4, atol=1e-5 * float(weight.grad.abs().max()))
    maxlib.save_pretrained(ours, tmp_path / "ours", generation={"pad_token_id": 0})
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert type(again) is type(model)
    theirs_again = again(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits
    np.testing.assert_allclose(theirs_again.detach(), wanted.detach(), rtol=1e-6, atol=1e-6)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.full
def test_labels_of_tokens_have_a_bias(tmp_path):
    model = theirs("Qwen3Config", 2, tmp_path / "theirs", kind="Token")
    with torch.no_grad():
        model.score.bias.normal_()
    model.save_pretrained(tmp_path / "theirs")
    wanted = model(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits.detach()
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    np.testing.assert_allclose(scores(ours)[VALID], wanted[VALID], rtol=1e-5, atol=1e-5)
    maxlib.save_pretrained(ours, tmp_path / "ours")
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "ours")
    assert bool((again.score.bias == model.score.bias).all())


def test_a_model_with_another_head_keeps_the_rest():
    model = filled_llama(num_layers=2)
    critic = nn.with_head(model, nn.ScoreHead(32, 1, rngs=nnx.Rngs(0)))
    values = critic.logits(critic(jnp.asarray(TOKENS), dtype=jnp.float32).hidden)
    assert values.shape == (3, 9, 1) and values.dtype == jnp.float32
    assert model.logits(model(jnp.asarray(TOKENS)).hidden).shape[-1] == 61  # the model is as it was
    with pytest.raises(ValueError, match="the last axes of x must be D=32 for the head"):
        critic.head.logits(jnp.ones((1, 5)))
