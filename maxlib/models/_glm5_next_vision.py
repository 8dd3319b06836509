"""Image encoder of GLM-5.3-Flash: images of any size, each attending only to itself, with normed queries and keys.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import PreNorm
from maxlib.models._vision import pad_to_squares, patch_context
from maxlib.nn.remat import Policy
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Field, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of the encoder, and the placeholder that stands for a square of patches of an image or a frame."""

    dim: int = 1024  # E
    num_layers: int = 24
    num_heads: int = 16
    mlp_dim: int = 4096
    patch_size: int = 14
    frames: int = 2  # of a patch; an image is shown in all of them
    merge: int = 2
    projector_dim: int = 10_240
    act_limit: float = 10.0
    norm_eps: float = 1e-5
    bias: bool = True
    rope_theta: float = 10_000.0
    image_token: int = 154_854
    video_token: int = 154_855
    start_token: int = 154_830
    end_token: int = 154_831
    video_start_token: int = 154_832
    video_end_token: int = 154_833

    def __post_init__(self):
        if self.dim % (4 * self.num_heads):
            raise ValueError(
                f"num_heads must divide dim (hidden_size) into heads of multiples of 4, got {self.num_heads} and {self.dim}"
            )

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.frames * self.patch_size**2


class Block(PreNorm):
    """Pre-norm layer in which each patch attends to all of its image."""

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        E, H = cfg.dim, cfg.dim // cfg.num_heads
        self.attn_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            E,
            num_heads=cfg.num_heads,
            head_dim=H,
            mask=ops.Full(),
            rope=ops.AxialRope(H, cfg.rope_theta),
            q_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
            k_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
            bias=cfg.bias,
            out_bias=cfg.bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(E, cfg.mlp_dim, bias=cfg.bias, limit=cfg.act_limit, rngs=rngs)


class ImageEncoder(nnx.Module):
    """Image encoder, rotated by row and column, whose squares of patches become one vector by a convolution.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, D, p, m = cfg.dim, text_dim, cfg.patch_size, cfg.merge
        axes = ("embed", "channel", "frame", "patch_row", "patch_column")
        self.patches = nn.Einsum("...CFab,DCFab->...D", (E, 3, cfg.frames, p, p), axes, bias=True, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(E, eps=cfg.norm_eps)
        axes = ("embed", "vision", "patch_row", "patch_column")
        self.join = nn.Einsum("...abE,DEab->...D", (D, E, m, m), axes, bias=True, rngs=rngs)
        self.enter = nn.Einsum("...E,DE->...D", (D, D), ("embed", "vision"), rngs=rngs)
        self.enter_norm = nn.LayerNorm(D)
        self.mlp = nn.GatedMLP(D, cfg.projector_dim, limit=cfg.act_limit, rngs=rngs)
        self.shape, self.merge = (3, cfg.frames, p, p), m
        self.rope = ops.AxialRope(E // cfg.num_heads, cfg.rope_theta)

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R S D"], None]:
        """Returns a vector for each square of patches, and None: there is nothing for later layers.

        Args:
            images: Patches of normalised pixels, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        pixels, at = pad_to_squares(images, self.merge)
        ctx = patch_context(at, (at.row, at.column), self.rope)
        x = self.patches(pixels.astype(dtype).reshape(*pixels.shape[:2], *self.shape))
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat)
        # The patches of a square stand together: [R, P, E] -> [R, S, merge, merge, E] -> [R, S, D]
        x = self.join(self.norm(x).reshape(len(x), -1, self.merge, self.merge, x.shape[2]))
        return self.mlp(exact_gelu(self.enter_norm(self.enter(x)))), None


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                Field("num_layers", "depth"),
                Field("num_heads"),
                Field("mlp_dim", "intermediate_size"),
                Field("patch_size"),
                Field("frames", "temporal_patch_size"),
                Field("merge", "spatial_merge_size"),
                Field("projector_dim", "projection_intermediate_size"),
                Field("act_limit", "swiglu_limit"),
                Field("norm_eps", "rms_norm_eps"),
                Field("bias", "attention_bias"),
            ],
        ),
        fields.axial_theta(10_000.0),
        Field("image_token", "image_token_id"),
        Field("video_token", "video_token_id"),
        Field("start_token", "image_start_token_id"),
        Field("end_token", "image_end_token_id"),
        Field("video_start_token", "video_start_token_id"),
        Field("video_end_token", "video_end_token_id"),
    ],
    fixed={
        "vision_config.model_type": "glm5_next_vision",
        "vision_config.in_channels": 3,
        "vision_config.hidden_act": "silu",
    },
    ignored=["vision_config.image_size"],  # images have any size
)


def table() -> Table:
    """Maps the tensor names of the release to parameters."""
    gated = [entry for part in ("gate", "up", "down") for entry in names.linear(f"{part}_proj", part)]
    layer = [
        Weight("norm1.weight", "attn_norm.scale"),
        Weight("norm2.weight", "mlp_norm.scale"),
        Weight("attn.q_norm.weight", "attn.q_norm.scale"),
        Weight("attn.k_norm.weight", "attn.k_norm.scale"),
        *names.heads_out("attn.proj", "attn.o"),
        *names.under(gated, "mlp", "mlp"),
    ]
    for n, part in enumerate("qkv"):
        layer.append(Weight("attn.qkv.weight", f"attn.{part}.w", "(three N H) D -> N H D", {"three": n}))
        layer.append(Weight("attn.qkv.bias", f"attn.{part}.b", "(three N H) -> N H", {"three": n}))
    outer = [
        *names.linear("patch_embed.proj", "patches"),
        *names.under(layer, "blocks.{i}", "layers.{i}"),
        Weight("post_layernorm.weight", "norm.scale"),
        *names.linear("downsample", "join"),
        *names.linear("merger.proj", "enter"),
        *names.layer_norm("merger.post_projection_norm", "enter_norm"),
        *names.under(gated, "merger", "mlp"),
    ]
    return names.under(outer, "model.visual", "tower")
