"""Gemma 3's image encoder: SigLIP, whose patches are pooled and projected to the text's width (arXiv:2503.19786)."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain
from maxlib.weights import REQUIRED, Field, Fields, Ignore, Renamed, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of the encoder, and the placeholders of an image in the text: `num_tokens` times `image_token`."""

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
        nn.vision.check_sizes(self.dim, self.num_heads, self.image_size, self.patch_size)
        if self.num_tokens * (self.pool * self.patch_size) ** 2 != self.image_size**2:
            raise ValueError(
                f"num_tokens must be a square whose root divides the {self.image_size} / {self.patch_size} patches of a "
                f"side, got {self.num_tokens}"
            )

    @property
    def pool(self) -> int:
        """Returns the side of the squares of patches that become one vector."""
        return self.image_size // self.patch_size // math.isqrt(self.num_tokens)


class SigLIP(nnx.Module):
    """Image encoder of SigLIP (Zhai et al. 2023, arXiv:2303.15343): square patches, learned positions, no class token.

    Args:
        cfg: Sizes.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        dim, patch_size = cfg.dim, cfg.patch_size
        self.image_size, self.patch_size = cfg.image_size, patch_size
        self.patches = nn.vision.patch_embedding(dim, patch_size, bias=True, rngs=rngs)
        init = nnx.initializers.normal(dim**-0.5)
        positions = init(rngs.params(), ((cfg.image_size // patch_size) ** 2, dim), jnp.float32)
        self.positions = nnx.Param(positions, axes=("position", "embed"))
        self.layers = nn.Stack(
            lambda _, rngs: nn.vision.EncoderBlock(
                dim, cfg.mlp_dim, num_heads=cfg.num_heads, eps=cfg.norm_eps, rngs=rngs
            ),
            cfg.num_layers,
            rngs=rngs,
        )
        self.norm = nn.LayerNorm(dim, eps=cfg.norm_eps)

    def __call__(
        self, images: Float[Array, "I C H W"], *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "I P D"]:
        """Returns one vector per patch, row by row.

        Args:
            images: RGB, from -1 to 1.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        grid = nn.vision.in_patches(images.astype(dtype), self.image_size, self.patch_size)
        x = self.patches(grid).reshape(len(images), -1, self.positions.shape[-1])  # [I, y, x, D] -> [I, P, D]
        x = constrain(x + jnp.asarray(self.positions[...], dtype)[None], "batch", "seq", "act_embed")
        x, _, _ = self.layers(x, nn.make_context(*x.shape[:2], masks=(ops.Full(),)), remat=remat)
        return self.norm(x)


class PoolProjector(nnx.Module):
    """Projector from patches to fewer vectors of the text's width: the mean of a square, a norm, a matmul.

    Args:
        cfg: Sizes.
        text_dim: Width of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.proj = nn.Einsum("...E,ED->...D", (cfg.dim, text_dim), ("vision", "embed"), rngs=rngs)
        self.pool = cfg.pool

    def __call__(self, x: Float[Array, "I P E"]) -> Float[Array, "I S D"]:
        I, P, E = x.shape
        side = math.isqrt(P) // self.pool
        # P = (side * pool)^2 patches, in rows -> the means of side^2 squares.
        x = x.reshape(I, side, self.pool, side, self.pool, E).mean(axis=(2, 4))
        return self.proj(self.norm(x.reshape(I, side * side, E)))


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                Field("mlp_dim", "intermediate_size"),
                Field("num_layers", "num_hidden_layers"),
                Field("num_heads", "num_attention_heads"),
                Field("image_size"),
                Field("patch_size"),
                Field("norm_eps", "layer_norm_eps"),
            ],
        ),
        Field("num_tokens", "mm_tokens_per_image"),
        Field("image_token", "image_token_index"),
        Field("begin_token", "boi_token_index"),
        Field("end_token", "eoi_token_index"),
    ],
    fixed={
        "vision_config.model_type": "siglip_vision_model",
        "vision_config.num_channels": 3,
        "vision_config.hidden_act": "gelu_pytorch_tanh",
        "vision_config.vision_use_head": (False, True),  # a pooling head that Gemma 3 never calls
    },
    absent=dict.fromkeys(("dim", "mlp_dim", "num_layers", "num_heads", "image_size", "patch_size"), REQUIRED),
)


def table() -> Table:
    """Maps the tensor names of the releases to parameters; transformers writes other spellings too."""
    hf_prefix = "vision_tower.vision_model"
    layer = [
        *names.layer_norm("layer_norm1", "attn_norm"),
        *names.attention("self_attn.{}_proj", "attn", out="self_attn.out_proj"),
        *names.layer_norm("layer_norm2", "mlp_norm"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    return [
        *names.linear(f"{hf_prefix}.embeddings.patch_embedding", "tower.patches"),
        Weight(f"{hf_prefix}.embeddings.position_embedding.weight", "tower.positions"),
        *names.under(layer, f"{hf_prefix}.encoder.layers.{{i}}", "tower.layers.{i}"),
        *names.layer_norm(f"{hf_prefix}.post_layernorm", "tower.norm"),
        Ignore(f"{hf_prefix}.head.*"),
        Weight("multi_modal_projector.mm_soft_emb_norm.weight", "projector.norm.scale"),
        Weight("multi_modal_projector.mm_input_projection_weight", "projector.proj.w"),
        Renamed("model.multi_modal_projector.", "multi_modal_projector."),
        Renamed("model.vision_tower.", "vision_tower."),
        Renamed("vision_tower.", f"{hf_prefix}."),
    ]
