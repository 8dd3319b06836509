"""Llama 4's eyes: a tower of its own, whose patches are laid side by side and projected to the text's width (Meta AI
2025).
"""

import dataclasses
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.weights import HFConfig, Table, Weight, names, written

SHUFFLE = 2  # side of the squares of patches that become one vector
# Our fields, what config.json calls them, and what it means by leaving one out.
TOWER = {
    "dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 34),
    "num_heads": ("num_attention_heads", 16),
    "image_size": ("image_size", 448),
    "patch_size": ("patch_size", 14),
    "projector_dim": ("projector_output_dim", 4096),
}
IMAGES = {
    "image_token": ("image_token_index", 200_092),
    "begin_token": ("boi_token_index", 200_080),
    "end_token": ("eoi_token_index", 200_081),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """The image tower, and what stands for a tile of an image in the text: `num_tokens` times `image_token`."""

    dim: int = 1408
    num_layers: int = 34
    num_heads: int = 16
    image_size: int = 336
    patch_size: int = 14
    projector_dim: int = 4096
    rope_theta: float = 10_000.0
    image_token: int = 200_092
    begin_token: int = 200_080
    end_token: int = 200_081

    def __post_init__(self):
        if self.image_size % (SHUFFLE * self.patch_size):
            raise ValueError(f"image_size must be a multiple of {SHUFFLE * self.patch_size}, got {self.image_size}")

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size // SHUFFLE) ** 2

    @property
    def mlp_dim(self) -> int:
        """Of the tower; the projector takes as many from a square of patches, and Hugging Face has one field for
        both.
        """
        return self.dim * SHUFFLE**2

    def tower(self, rngs: nnx.Rngs) -> nn.vision.Llama4Vision:
        sizes = {name: getattr(self, name) for name in ("num_layers", "num_heads", "image_size", "patch_size")}
        return nn.vision.Llama4Vision(self.dim, self.mlp_dim, **sizes, theta=self.rope_theta, rngs=rngs)

    def projector(self, dim: int, rngs: nnx.Rngs) -> nn.vision.ShuffleProjector:
        return nn.vision.ShuffleProjector(self.dim, self.projector_dim, dim, shuffle=SHUFFLE, rngs=rngs)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Vision":
        """Reads the part of config.json that is about images."""
        tower = fields.nested("vision_config")
        tower.require("model_type", "llama4_vision_model")
        tower.require("hidden_act", "gelu")
        tower.require("num_channels", 3)
        # The releases have these, and nothing reads them: the norms' epsilon is 1e-5, and no projector has a bias.
        tower.ignore("norm_eps", "multi_modal_projector_bias", "vision_feature_layer", "vision_feature_select_strategy")
        tower.require("pixel_shuffle_ratio", 1 / SHUFFLE)
        read = tower.read(TOWER) | fields.read(IMAGES)
        rope = tower.rope(head_dim=read["dim"] // read["num_heads"])
        if rope.scaling is not None:
            raise ValueError(f"config.json: the rope of vision_config must have no scaling, got {rope.scaling}")
        vision = cls(**read, rope_theta=rope.theta)
        tower.require("intermediate_size", vision.mlp_dim)
        for name in ("projector_input_dim", "vision_output_dim"):
            tower.require(name, vision.projector_dim)
        return vision

    def to_hf(self) -> dict[str, Any]:
        tower = {
            "model_type": "llama4_vision_model",
            "num_channels": 3,
            "hidden_act": "gelu",
            "intermediate_size": self.mlp_dim,
            "projector_input_dim": self.projector_dim,
            "vision_output_dim": self.projector_dim,
            "pixel_shuffle_ratio": 1 / SHUFFLE,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }
        return {"vision_config": tower | written(self, TOWER), **written(self, IMAGES)}


def table() -> Table:
    layer = [
        *names.layer_norm("input_layernorm", "attn_norm"),
        *names.ATTENTION,
        *names.layer_norm("post_attention_layernorm", "mlp_norm"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    return [
        Weight("vision_model.patch_embedding.linear.weight", "tower.patches.w", "D (C a b) -> D C a b"),
        Weight("vision_model.class_embedding", "tower.class_token"),
        Weight("vision_model.positional_embedding_vlm", "tower.positions"),
        *names.layer_norm("vision_model.layernorm_pre", "tower.pre_norm"),
        *names.under(layer, "vision_model.model.layers.{i}", "tower.layers.{i}"),
        *names.layer_norm("vision_model.layernorm_post", "tower.norm"),
        Weight("vision_model.vision_adapter.mlp.fc1.weight", "projector.up.w"),
        Weight("vision_model.vision_adapter.mlp.fc2.weight", "projector.down.w"),
        Weight("multi_modal_projector.linear_1.weight", "projector.proj.w"),
    ]
