"""Gemma 3's eyes: a SigLIP tower, whose patches are pooled and projected to the text's width (arXiv:2503.19786)."""

import dataclasses
import math
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.weights import HFConfig, Ignore, Renamed, Table, Weight, names, written

GELU = "gelu_pytorch_tanh"
# Our fields, and what config.json calls them; with what it means by leaving one out.
TOWER = {
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "norm_eps": ("layer_norm_eps", 1e-6),
}
IMAGES = {
    "num_tokens": ("mm_tokens_per_image", 256),
    "image_token": ("image_token_index", 262_144),
    "begin_token": ("boi_token_index", 255_999),
    "end_token": ("eoi_token_index", 256_000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """The image tower, and what stands for an image in the text: `num_tokens` times `image_token`."""

    dim: int = 1152
    mlp_dim: int = 4304
    num_layers: int = 27
    num_heads: int = 16
    image_size: int = 896
    patch_size: int = 14
    norm_eps: float = 1e-6
    num_tokens: int = 256
    image_token: int = 262_144
    begin_token: int = 255_999
    end_token: int = 256_000

    def __post_init__(self):
        if self.num_tokens * (self.pool * self.patch_size) ** 2 != self.image_size**2:
            raise ValueError(
                f"num_tokens must be a square whose root divides the {self.image_size} / {self.patch_size} patches of a "
                f"side, got {self.num_tokens}"
            )

    @property
    def pool(self) -> int:
        """Side of the squares of patches that become one vector."""
        return self.image_size // self.patch_size // math.isqrt(self.num_tokens)

    def tower(self, rngs: nnx.Rngs) -> nn.vision.SigLIP:
        sizes = {name: getattr(self, name) for name in ("num_layers", "num_heads", "image_size", "patch_size")}
        return nn.vision.SigLIP(self.dim, self.mlp_dim, **sizes, eps=self.norm_eps, rngs=rngs)

    def projector(self, dim: int, rngs: nnx.Rngs) -> nn.vision.PoolProjector:
        norm = nn.RMSNorm(self.dim, eps=self.norm_eps, plus_one=True)
        return nn.vision.PoolProjector(self.dim, dim, pool=self.pool, norm=norm, rngs=rngs)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Vision":
        """Reads the part of config.json that is about images."""
        tower = fields.nested("vision_config")
        tower.require("model_type", "siglip_vision_model")
        tower.require("hidden_act", GELU)
        tower.require("num_channels", 3)
        tower.ignore("vision_use_head")  # a pooling head that Gemma 3 never calls
        return cls(**tower.read(TOWER), **fields.read(IMAGES))

    def to_hf(self) -> dict[str, Any]:
        tower = {"model_type": "siglip_vision_model", "num_channels": 3, "hidden_act": GELU, "vision_use_head": False}
        return {"vision_config": tower | written(self, TOWER), **written(self, IMAGES)}


def table() -> Table:
    """Names of the releases; transformers writes other spellings too."""
    theirs = "vision_tower.vision_model"
    attention = [dataclasses.replace(w, theirs=w.theirs.replace("o_proj", "out_proj")) for w in names.ATTENTION]
    layer = [
        *names.layer_norm("layer_norm1", "attn_norm"),
        *attention,
        *names.layer_norm("layer_norm2", "mlp_norm"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    return [
        *names.linear(f"{theirs}.embeddings.patch_embedding", "tower.patches"),
        Weight(f"{theirs}.embeddings.position_embedding.weight", "tower.positions"),
        *names.under(layer, f"{theirs}.encoder.layers.{{i}}", "tower.layers.{i}"),
        *names.layer_norm(f"{theirs}.post_layernorm", "tower.norm"),
        Ignore(f"{theirs}.head.*"),
        Weight("multi_modal_projector.mm_soft_emb_norm.weight", "projector.norm.scale"),
        Weight("multi_modal_projector.mm_input_projection_weight", "projector.proj.w"),
        Renamed("model.multi_modal_projector.", "multi_modal_projector."),
        Renamed("model.vision_tower.", "vision_tower."),
        Renamed("vision_tower.", f"{theirs}."),
    ]
