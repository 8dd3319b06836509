"""Gemma 3 with images against transformers: tower, projector, and bidirectional attention among an image's tokens."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import nn
from maxlib.models import gemma3
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

IMAGE, PER_IMAGE, SEQ = 60, 4, 22
# Rows with two images, one image, and one more that begins the text; one image is longer than what a window leaves of
# it.
PLACES = [(0, 2), (0, 12), (1, 9), (2, 0)]


def config(**text) -> Any:
    transformers = pytest.importorskip("transformers")
    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": None,
        "sliding_window": 3,
        "query_pre_attn_scalar": 20,
        "max_position_embeddings": 64,
        "layer_types": [gemma3.LOCAL, gemma3.GLOBAL],
    }
    tower = {
        "hidden_size": 24,
        "intermediate_size": 30,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 12,
        "patch_size": 3,
        "vision_use_head": False,
        "model_type": "siglip_vision_model",
    }
    return transformers.Gemma3Config(
        text_config={**base, **text}, vision_config=tower, mm_tokens_per_image=PER_IMAGE, image_token_index=IMAGE
    )


@functools.cache
def inputs() -> tuple[np.ndarray, np.ndarray]:
    return tokens_and_images(SEQ, IMAGE, PER_IMAGE, PLACES)


def run(model, tokens: np.ndarray, images: np.ndarray) -> Any:
    """transformers' logits; it is told which tokens are images'."""
    import torch

    ids = torch.from_numpy(tokens).long()
    return model(ids, pixel_values=torch.from_numpy(images), token_type_ids=(ids == IMAGE).long()).logits


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The directory of a transformers model, its logits, and the gradients of its loss under the names of files."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Gemma3ForConditionalGeneration(config()).eval()
    return reference(model, run, *inputs(), tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def model(theirs):
    return maxlib.from_pretrained(theirs[0])


def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under the names of Google's files."""
    return {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}


def test_logits_are_those_of_transformers(theirs, model):
    assert_close(logits_of(model, *inputs()), theirs[1], 1e-4)


def test_gradients_are_those_of_transformers(theirs, model, tmp_path):
    params, rest = nn.partition(model)
    maxlib.save_pretrained(nn.combine(gradients_of(params, rest, *inputs()), rest), tmp_path / "gradients")
    got, want = load_file(tmp_path / "gradients" / "model.safetensors"), released(theirs[2])
    assert got.keys() == want.keys()
    for name, value in want.items():
        # The softmax does not see what all keys share: the bias of the tower's keys has no gradient but rounding.
        scale = 1.0 if "vision" in name and "k_proj.bias" in name else np.linalg.norm(value)
        assert np.linalg.norm(got[name] - value) < 1e-4 * scale, name


def test_export_is_what_was_read_and_transformers_opens_it(theirs, model, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    maxlib.save_pretrained(model, tmp_path / "export")
    want, got = released(load_file(theirs[0] / "model.safetensors")), load_file(tmp_path / "export/model.safetensors")
    assert got.keys() == want.keys()
    assert all(got[name].tobytes() == value.tobytes() for name, value in want.items())
    assert read_model(tmp_path / "export")[1] == model.cfg
    again, info = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "export", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert_close(run(again, *inputs()).numpy(), theirs[1], 1e-6)


def test_every_spelling_of_names_is_read(theirs, model, tmp_path):
    stored = load_file(theirs[0] / "model.safetensors")
    prefixes = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}
    prefixes["multi_modal_projector."] = "model.multi_modal_projector."
    in_memory = {
        new + n.removeprefix(old): v for n, v in stored.items() for old, new in prefixes.items() if n.startswith(old)
    }
    in_memory["model.vision_tower.head.probe"] = np.zeros((1, 1, 24), np.float32)  # a part that Gemma 3 never calls
    for spelling in (released(stored), in_memory):
        save_file(spelling, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((theirs[0] / "config.json").read_text())
        again = maxlib.from_pretrained(tmp_path)
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get((again, model)))
    save_file({**stored, **in_memory}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="another name of"):
        maxlib.from_pretrained(tmp_path)


@pytest.mark.parametrize("field", ["image_token_index", "mm_tokens_per_image", "layer_norm_eps"])
def test_fields_matter(theirs, model, tmp_path, field):
    data = json.loads((theirs[0] / "config.json").read_text())
    before, (tokens, images) = np.asarray(logits_of(model, *inputs())), inputs()
    if field == "layer_norm_eps":
        data["vision_config"][field] = 0.1
    else:
        data[field] = {"image_token_index": 61, "mm_tokens_per_image": 16}[field]
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").write_bytes((theirs[0] / "model.safetensors").read_bytes())
    other = maxlib.from_pretrained(tmp_path)
    if field == "layer_norm_eps":
        assert np.abs(np.asarray(logits_of(other, tokens, images)) - before).max() > 1e-3 * before.std()
    else:
        with pytest.raises(ValueError, match="image placeholders, but the given images make"):
            other(jnp.asarray(tokens), images=jnp.asarray(images))


def test_placeholders_without_images_are_nan_inside_jit(model):
    """Outside of it they are an error."""
    tokens = jnp.asarray(inputs()[0])
    embedded = jax.jit(lambda model, tokens: model.embed_inputs(tokens, dtype=jnp.float32)[0])(model, tokens)
    np.testing.assert_array_equal(np.isnan(embedded).any(axis=2), tokens == IMAGE)
    with pytest.raises(ValueError, match="the given images make 0 vectors"):
        model(tokens)


def test_packed_equals_separate(model):
    """All rows as documents of one, the image that begins the third right behind the second."""
    tokens, images = inputs()
    segments = np.repeat(np.arange(1, 4, dtype=np.int32), SEQ)[None]
    got = logits_of(model, tokens.reshape(1, -1), images, segments).reshape(3, SEQ, -1)
    assert_close(got, logits_of(model, tokens, images))


def test_images_that_touch_in_different_documents_do_not_see_each_other(model):
    _, images = inputs()
    tokens = np.full((1, 2 * PER_IMAGE), IMAGE, np.int32)
    segments = np.repeat(np.array([1, 2], np.int32), PER_IMAGE)[None]
    alone = logits_of(model, tokens.reshape(2, -1), images[:2])
    assert_close(logits_of(model, tokens, images[:2], segments).reshape(alone.shape), alone)


def test_prefill_and_decode_equal_the_full_pass(model):
    cache = check_decoding(model, *inputs(), lengths=[16, 13, 7])
    assert {a.shape[-3] for a in jax.tree.leaves(cache.layers)} == {3, SEQ}


def test_eight_devices_equal_one(theirs, model):
    check_eight_devices(theirs[0], model, *inputs())


def test_wrong_images_are_refused(model):
    check_wrong_images(model, *inputs())


def test_a_text_model_refuses_images(model):
    text = jax.eval_shape(lambda: gemma3.Gemma3(dataclasses.replace(model.cfg, vision=None), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="reads text only"):
        jax.eval_shape(lambda model, tokens, images: model(tokens, images=images), text, *inputs())
