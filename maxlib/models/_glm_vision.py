"""Image encoders of GLM-4V (arXiv:2507.01006) and GLM-5.3-Flash: images of any size, each attending only to itself.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm
from maxlib.models._vision import IMAGE, PATCHES, PatchEncoder, PatchSizes, bicubic, video_patches
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision(PatchSizes):
    """Sizes of the encoder, and the placeholder that stands for a square of patches of an image or a frame."""

    dim: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    mlp_dim: int = 4096
    frames: int = 2
    projector_dim: int = 10_240
    act_limit: float | None = 10.0
    norm_eps: float = 1e-5
    bias: bool = True
    image_token: int = 154_854
    video_token: int = 154_855
    start_token: int = 154_830
    end_token: int = 154_831
    video_start_token: int = 154_832
    video_end_token: int = 154_833


@dataclass(frozen=True, kw_only=True)
class PositionedVision(Vision):
    """Sizes of the encoder of GLM-4V, whose MLP is as wide as the text."""

    mrope: ClassVar[bool] = True

    dim: int = 1536
    num_heads: int = 12
    side: int = 24  # of a square table of positions, resized for each image
    projector_dim: int = 13_696
    act_limit: float | None = None
    bias: bool = False  # of queries, keys and values
    image_token: int = 151_343
    video_token: int = 151_344
    start_token: int = 151_339
    end_token: int = 151_340
    video_start_token: int = 151_341
    video_end_token: int = 151_342


class Block(PreNorm):
    """Pre-norm layer in which each patch attends to all of its image, with normed queries and keys."""

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        E, H = cfg.dim, cfg.head_dim
        self.attn_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            E,
            num_heads=cfg.num_heads,
            head_dim=H,
            mask=IMAGE,
            rope=cfg.rope,
            q_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
            k_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
            bias=cfg.bias,
            out_bias=cfg.bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(E, cfg.mlp_dim, bias=cfg.bias, limit=cfg.act_limit, rngs=rngs)


class PositionedBlock(PreNorm):
    """GLM-4V's layer: no norms of queries and keys, and no biases but theirs."""

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        E, N, H = cfg.dim, cfg.num_heads, cfg.head_dim
        self.attn_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.attn = nn.Attention(E, num_heads=N, head_dim=H, mask=IMAGE, rope=cfg.rope, bias=cfg.bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(E, cfg.mlp_dim, rngs=rngs)


class ImageEncoder(PatchEncoder):
    """Image encoder, rotated by row and column, whose squares of patches become one vector by a convolution.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        block: Makes a layer.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, block: Callable[..., nnx.Module] = Block, rngs: nnx.Rngs):
        E, D, p, m = cfg.dim, text_dim, cfg.patch_size, cfg.merge
        self.cfg, self.shape = cfg, (3, cfg.frames, p, p)
        self.patches = video_patches(cfg, bias=True, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        axes = ("embed", "vision", "patch_row", "patch_column")
        self.join = nn.Einsum("...abE,DEab->...D", (D, E, m, m), axes, bias=True, rngs=rngs)
        self.enter = nn.Einsum("...E,DE->...D", (D, D), ("embed", "vision"), rngs=rngs)
        self.enter_norm = nn.LayerNorm(D)
        self.mlp = nn.GatedMLP(D, cfg.projector_dim, limit=cfg.act_limit, rngs=rngs)

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares."""
        # The patches of a square stand together: [R, P, E] -> [R, S, merge, merge, E] -> [R, S, D]
        m = self.cfg.merge
        x = self.join(self.norm(x).reshape(len(x), -1, m, m, x.shape[2]))
        return self.mlp(exact_gelu(self.enter_norm(self.enter(x))))


class PositionedEncoder(ImageEncoder):
    """GLM-4V's encoder, which norms patches and adds learned positions to them."""

    def __init__(self, cfg: PositionedVision, text_dim: int, *, rngs: nnx.Rngs):
        super().__init__(cfg, text_dim, block=PositionedBlock, rngs=rngs)
        self.patch_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        values = nnx.initializers.normal(0.02)(rngs.params(), (cfg.side, cfg.side, cfg.dim), jnp.float32)
        self.positions = nnx.Param(values, axes=("position", "position", "embed"))

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the normed patches with their positions added."""
        return self.patch_norm(x) + bicubic(constrain(self.positions[...], "position", "position", None), at, x.dtype)


_SIZES = (
    Field("dim", "hidden_size"),
    *PATCHES,
    Field("norm_eps", "rms_norm_eps"),
    Field("bias", "attention_bias"),
)
_TOKENS = (
    fields.axial_theta(10_000.0),
    Field("image_token", "image_token_id"),
    Field("video_token", "video_token_id"),
    Field("start_token", "image_start_token_id"),
    Field("end_token", "image_end_token_id"),
    Field("video_start_token", "video_start_token_id"),
    Field("video_end_token", "video_end_token_id"),
)
_FIXED = {"vision_config.in_channels": 3, "vision_config.hidden_act": "silu"}
FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                *_SIZES,
                fields.MLP,
                Field("projector_dim", "projection_intermediate_size"),
                Field("act_limit", "swiglu_limit"),
            ],
        ),
        *_TOKENS,
    ],
    fixed=_FIXED | {"vision_config.model_type": "glm5_next_vision"},
    ignored=["vision_config.image_size"],  # images have any size
)


def _read_side(hf: HFConfig, c: Any) -> int:
    """Returns the patches along a side of the images whose positions were learned."""
    return hf.nested("vision_config").take("image_size", 336) // c.patch_size


def _write_side(side: int, cfg: PositionedVision) -> dict[str, Any]:
    return {"vision_config.image_size": side * cfg.patch_size}


def positioned_fields(image_token: int, video_token: int) -> Fields:
    """Makes the fields of GLM-4V's encoder, with the placeholders of a config that leaves them out."""
    inner = [*_SIZES, Field("mlp_dim", "out_hidden_size"), Field("projector_dim", "intermediate_size")]
    return Fields(
        PositionedVision,
        [*fields.under("vision_config", inner), Computed("side", _read_side, _write_side), *_TOKENS],
        fixed=_FIXED,
        absent={"image_token": image_token, "video_token": video_token},
    )


def table() -> Table:
    """Maps the tensor names of the releases to parameters; entries of parts that an encoder lacks are passed over."""
    layer = [
        *names.norms(attn_norm="norm1", mlp_norm="norm2"),
        Weight("attn.q_norm.weight", "attn.q_norm.scale"),
        Weight("attn.k_norm.weight", "attn.k_norm.scale"),
        *names.qkv("attn.qkv", "attn"),
        *names.heads_out("attn.proj", "attn.o"),
        *names.mlp("mlp.{}_proj", "mlp"),
    ]
    outer = [
        *names.linear("patch_embed.proj", "patches"),
        Weight("post_conv_layernorm.weight", "patch_norm.scale"),
        Weight("embeddings.position_embedding.weight", "positions", "(rows columns) E -> rows columns E"),
        *names.under(layer, "blocks.{i}", "layers.{i}"),
        Weight("post_layernorm.weight", "norm.scale"),
        *names.linear("downsample", "join"),
        *names.linear("merger.proj", "enter"),
        *names.layer_norm("merger.post_projection_norm", "enter_norm"),
        *names.mlp("merger.{}_proj", "mlp"),
    ]
    return names.under(outer, "model.visual", "tower")
