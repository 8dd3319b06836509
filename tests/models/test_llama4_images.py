"""Llama 4 with images against transformers: tower, projector, and their vectors among text."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn
from maxlib.models import llama4
from maxlib.weights import read_model
from tests.models.conformance import assert_close
from tests.models.fixed_images import (
    check_decoding,
    check_eight_devices,
    check_wrong_images,
    gradients_of,
    logits_of,
    reference,
    tokens_and_images,
)

pytestmark = pytest.mark.full  # transformers computes the reference

IMAGE, PER_TILE, SEQ = 60, 4, 18
# Rows with two tiles, one tile, and one more that begins the text; one tile lies in two chunks.
PLACES = [(0, 2), (0, 10), (1, 9), (2, 0)]


def config() -> Any:
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 20,
        "intermediate_size_mlp": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 3,
        "max_position_embeddings": 64,
    }
    tower = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 3,
        "projector_input_dim": 28,
        "projector_output_dim": 28,
        "vision_output_dim": 28,
    }
    return transformers.Llama4Config(text_config=text, vision_config=tower, image_token_index=IMAGE)


@functools.cache
def inputs() -> tuple[np.ndarray, np.ndarray]:
    return tokens_and_images(SEQ, IMAGE, PER_TILE, PLACES)


def run(model, tokens: np.ndarray, images: np.ndarray) -> Any:
    import torch

    return model(torch.from_numpy(tokens).long(), pixel_values=torch.from_numpy(images)).logits


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The directory of a transformers model, its logits, and the gradients of its loss under the names of files."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Llama4ForConditionalGeneration(config()).eval()
    return reference(model, run, *inputs(), tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def model(theirs):
    return maxlib.from_pretrained(theirs[0])


def test_logits_are_those_of_transformers(theirs, model):
    assert_close(logits_of(model, *inputs()), theirs[1], 1e-4)


def test_gradients_are_those_of_transformers(theirs, model, tmp_path):
    params, rest = nn.partition(model)
    maxlib.save_pretrained(nn.combine(gradients_of(params, rest, *inputs()), rest), tmp_path / "gradients")
    got, want = load_file(tmp_path / "gradients" / "model.safetensors"), theirs[2]
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.linalg.norm(got[name] - value) < 1e-4 * np.linalg.norm(value), name


def test_export_is_what_was_read_and_transformers_opens_it(theirs, model, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    maxlib.save_pretrained(model, tmp_path / "export")
    want, got = (load_file(path / "model.safetensors") for path in (theirs[0], tmp_path / "export"))
    assert got.keys() == want.keys()
    assert all(got[name].tobytes() == value.tobytes() for name, value in want.items())
    assert read_model(tmp_path / "export")[1] == model.cfg
    again, info = transformers.Llama4ForConditionalGeneration.from_pretrained(
        tmp_path / "export", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert_close(run(again, *inputs()).numpy(), theirs[1], 1e-6)


def altered(theirs, tmp_path, **vision):
    """The model of the same weights under another config; what is no field of the tower is one of the whole."""
    data = json.loads((theirs[0] / "config.json").read_text())
    for field, value in vision.items():
        (data["vision_config"] if field in data["vision_config"] else data)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").write_bytes((theirs[0] / "model.safetensors").read_bytes())
    return maxlib.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields", [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, {"num_attention_heads": 6}], ids=str
)
def test_fields_matter(theirs, model, tmp_path, fields):
    before = np.asarray(logits_of(model, *inputs()))
    other = altered(theirs, tmp_path, **fields)
    assert np.abs(np.asarray(logits_of(other, *inputs())) - before).max() > 1e-3 * before.std()


@pytest.mark.parametrize(
    "fields",
    [
        {"pixel_shuffle_ratio": 0.25},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"num_channels": 1},
        {"intermediate_size": 48},
        {"projector_input_dim": 24},
        {"vision_output_dim": 24},
        {"image_size": 15},
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(theirs, tmp_path, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        altered(theirs, tmp_path, **fields)


def test_prefill_and_decode_equal_the_full_pass(model):
    check_decoding(model, *inputs(), lengths=[14, 13, 7])


def test_eight_devices_equal_one(theirs, model):
    check_eight_devices(theirs[0], model, *inputs())


def test_wrong_images_are_refused(model):
    check_wrong_images(model, *inputs())


def test_the_text_of_a_model_that_sees_can_be_read_alone(theirs, model):
    text = maxlib.from_pretrained(theirs[0], vision=None)
    alone = dataclasses.replace(model.cfg, vision=None)
    shapes = jax.eval_shape(lambda: llama4.Llama4(alone, rngs=nnx.Rngs(0)))
    assert jax.tree.structure(text) == jax.tree.structure(shapes)
    tokens = inputs()[0] % IMAGE
    assert_close(logits_of(text, tokens, None), logits_of(model, tokens, None), 1e-6)
    with pytest.raises(ValueError, match="reads text only"):
        text(jnp.asarray(tokens), images=jnp.asarray(inputs()[1]))
