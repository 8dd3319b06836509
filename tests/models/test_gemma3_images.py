"""Gemma 3 with images against transformers: tower, projector, and bidirectional attention among an image's tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib.models import gemma3
from tests.models.conformance import assert_close
from tests.models.fixed_images import FixedImages, logits_of

IMAGE, PER_IMAGE = 60, 4


def config(**text: Any) -> Any:
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


@pytest.mark.full
class TestGemma3Images(FixedImages):
    theirs_class = "Gemma3ForConditionalGeneration"
    seq = 22
    # Rows with two images, one image, and one more that begins the text; one image is longer than what a window leaves
    # of it.
    places = [(0, 2), (0, 12), (1, 9), (2, 0)]
    lengths = [16, 13, 7]
    slots = {3, 22}

    test_the_text_of_a_model_that_sees_can_be_read_alone = None  # its files have no text model's names

    @classmethod
    def config(cls) -> Any:
        return config()

    @staticmethod
    def run(model: Any, tokens: np.ndarray, images: np.ndarray) -> Any:
        """transformers is told which tokens are images'."""
        import torch

        ids = torch.from_numpy(tokens).long()
        return model(ids, pixel_values=torch.from_numpy(images), token_type_ids=(ids == IMAGE).long()).logits

    @staticmethod
    def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}

    def test_every_spelling_of_names_is_read(self, theirs, model, tmp_path):
        stored = load_file(theirs[0] / "model.safetensors")
        prefixes = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}
        prefixes["multi_modal_projector."] = "model.multi_modal_projector."
        in_memory = {
            new + n.removeprefix(old): v
            for n, v in stored.items()
            for old, new in prefixes.items()
            if n.startswith(old)
        }
        in_memory["model.vision_tower.head.probe"] = np.zeros((1, 1, 24), np.float32)  # a part that is never called
        (tmp_path / "config.json").write_text((theirs[0] / "config.json").read_text())
        for spelling in (self.released(stored), in_memory):
            save_file(spelling, tmp_path / "model.safetensors")
            again = maxlib.from_pretrained(tmp_path)
            jax.tree.map(np.testing.assert_array_equal, *jax.device_get((again, model)))
        save_file({**stored, **in_memory}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="another name of"):
            maxlib.from_pretrained(tmp_path)

    def test_fields_matter(self, theirs, model, inputs, tmp_path):
        tokens, images = inputs
        before = np.asarray(logits_of(model, *inputs))
        other = self.altered(theirs, tmp_path, layer_norm_eps=0.1)
        assert np.abs(np.asarray(logits_of(other, *inputs)) - before).max() > 1e-3 * before.std()
        for field, value in {"image_token_index": 61, "mm_tokens_per_image": 16}.items():
            with pytest.raises(ValueError, match="image placeholders, but the given images make"):
                self.altered(theirs, tmp_path, **{field: value})(jnp.asarray(tokens), images=jnp.asarray(images))

    def test_placeholders_without_images_are_nan_inside_jit(self, model, inputs):
        tokens = jnp.asarray(inputs[0])
        embedded = jax.jit(lambda model, tokens: model.embed_inputs(tokens, dtype=jnp.float32)[0])(model, tokens)
        np.testing.assert_array_equal(np.isnan(embedded).any(axis=2), tokens == IMAGE)

    def test_packed_equals_separate(self, model, inputs):
        """All rows as documents of one, the image that begins the third right behind the second."""
        tokens, images = inputs
        segments = np.repeat(np.arange(1, 4, dtype=np.int32), self.seq)[None]
        got = logits_of(model, tokens.reshape(1, -1), images, segments).reshape(3, self.seq, -1)
        assert_close(got, logits_of(model, tokens, images))

    def test_images_that_touch_in_different_documents_do_not_see_each_other(self, model, inputs):
        _, images = inputs
        tokens = np.full((1, 2 * PER_IMAGE), IMAGE, np.int32)
        segments = np.repeat(np.array([1, 2], np.int32), PER_IMAGE)[None]
        alone = logits_of(model, tokens.reshape(2, -1), images[:2])
        assert_close(logits_of(model, tokens, images[:2], segments).reshape(alone.shape), alone)
