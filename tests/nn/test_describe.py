"""Descriptions of models against their files, including a model unknown to maxlib."""

import dataclasses

import jax
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.models import deepseek, gemma3, gpt2
from tests.nn.tiny import LLAMA, tiny_llama
from tests.outside import Outside

DEEPSEEK = deepseek.Config(
    version=3,
    vocab=10,
    num_layers=3,
    num_dense=1,
    dim=8,
    mlp_dim=12,
    expert_dim=4,
    num_heads=2,
    q_rank=None,
    kv_rank=4,
    nope_dim=4,
    v_dim=4,
    rope=ops.Rope(4, scaling=ops.YarnScaling(4.0, 16)),
    num_experts=6,
    num_shared=1,
    top_k=2,
    num_mtp=1,
)
SIGHT = gemma3.Vision(
    dim=8, mlp_dim=8, num_layers=1, num_heads=2, image_size=4, patch_size=2, num_tokens=1, image_token=9
)
GEMMA3 = gemma3.Config(
    vocab=10,
    num_layers=2,
    dim=8,
    mlp_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    window=4,
    rope=ops.Rope(4),
    local_rope=ops.Rope(4),
    vision=SIGHT,
)
GPT2 = gpt2.Config(vocab=10, num_layers=2, dim=8, mlp_dim=8, num_heads=2, num_positions=16)


def shape(model, cfg=None):
    return jax.eval_shape(lambda: model(rngs=nnx.Rngs(0)) if cfg is None else model(cfg, rngs=nnx.Rngs(0)))


def test_a_model_from_outside():
    model = shape(Outside)
    assert nn.describe.features(model) == (
        "RoPE",
        "sliding window",
        "LayerNorm",
        "biases on down up",
        "logit soft-cap",
        "tied head",
    )
    assert nn.describe.attention_kind(model) == "MHA" and nn.describe.cache_kinds(model) == ("full", "ring")
    assert nn.describe.num_active_parameters(model) == nn.num_parameters(model) and nn.describe.input_names(model) == ()


def test_experts_and_latents():
    model = shape(deepseek.DeepSeek, DEEPSEEK)
    assert nn.describe.features(model) == ("YaRN", "2 of 6 experts", "shared expert", "multi-token prediction")
    assert nn.describe.attention_kind(model) == "MLA" and nn.describe.cache_kinds(model) == ("latent",)
    # Four of six experts stay idle, in two layers and the prediction module; each has three matrices.
    assert nn.num_parameters(model) - nn.describe.num_active_parameters(model) == 3 * 4 * 3 * 8 * 4


def test_positions_and_biases():
    model = shape(gpt2.GPT2, GPT2)
    assert nn.describe.features(model) == ("learned positions", "LayerNorm", "biases on down k o q up v", "tied head")
    assert nn.describe.cache_kinds(model) == ("full",)  # asked for no more tokens than it has positions


def test_images_and_windows():
    seeing, reading = shape(gemma3.Gemma3, GEMMA3), shape(gemma3.Gemma3, dataclasses.replace(GEMMA3, vision=None))
    assert nn.describe.input_names(seeing) == ("images",) and nn.describe.input_names(reading) == ()
    assert (
        nn.describe.features(seeing)
        == nn.describe.features(reading)
        == ("RoPE", "qk-norm", "sliding window", "tied head")
    )


@pytest.mark.parametrize(("keys", "kind"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
def test_kinds_of_attention(keys, kind):
    assert nn.describe.attention_kind(jax.eval_shape(lambda: tiny_llama(num_kv_heads=keys))) == kind
    assert LLAMA.num_heads == 4
