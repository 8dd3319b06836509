"""Llama 4 with images against transformers: tower, projector, and their vectors among text."""

from typing import Any

import numpy as np
import pytest

from tests.models.fixed_images import FixedImages, logits_of


@pytest.mark.full
class TestLlama4Images(FixedImages):
    theirs_class = "Llama4ForConditionalGeneration"
    seq = 18
    # Rows with two tiles, one tile, and one more that begins the text; one tile lies in two chunks.
    places = [(0, 2), (0, 10), (1, 9), (2, 0)]
    lengths = [14, 13, 7]

    @classmethod
    def config(cls) -> Any:
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
        return transformers.Llama4Config(text_config=text, vision_config=tower, image_token_index=cls.image)

    @staticmethod
    def run(model: Any, tokens: np.ndarray, images: np.ndarray) -> Any:
        import torch

        return model(torch.from_numpy(tokens).long(), pixel_values=torch.from_numpy(images)).logits

    @pytest.mark.parametrize(
        "fields", [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, {"num_attention_heads": 6}]
    )
    def test_fields_matter(self, theirs, model, inputs, tmp_path, fields):
        before = np.asarray(logits_of(model, *inputs))
        other = self.altered(theirs, tmp_path, **fields)
        assert np.abs(np.asarray(logits_of(other, *inputs)) - before).max() > 1e-3 * before.std()

    def test_what_is_not_computed_is_refused(self, theirs, tmp_path):
        refused = {"pixel_shuffle_ratio": 0.25, "hidden_act": "gelu_pytorch_tanh", "num_channels": 1, "image_size": 15}
        refused |= {"intermediate_size": 48, "projector_input_dim": 24, "vision_output_dim": 24}
        for field, value in refused.items():
            with pytest.raises(ValueError, match=field):
                self.altered(theirs, tmp_path, **{field: value})
