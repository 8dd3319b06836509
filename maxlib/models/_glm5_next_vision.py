"""Image encoder of GLM-5.3-Flash: images of any size, each attending only to itself, with normed queries and keys.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm
from maxlib.models._vision import IMAGE, PATCHES, PatchEncoder, PatchSizes, video_patches
from maxlib.nn.vision import exact_gelu
from maxlib.weights import Field, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision(PatchSizes):
    """Sizes of the encoder, and the placeholder that stands for a square of patches of an image or a frame."""

    dim: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    mlp_dim: int = 4096
    frames: int = 2
    projector_dim: int = 10_240
    act_limit: float = 10.0
    norm_eps: float = 1e-5
    bias: bool = True
    image_token: int = 154_854
    video_token: int = 154_855
    start_token: int = 154_830
    end_token: int = 154_831
    video_start_token: int = 154_832
    video_end_token: int = 154_833


class Block(PreNorm):
    """Pre-norm layer in which each patch attends to all of its image."""

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


class ImageEncoder(PatchEncoder):
    """Image encoder, rotated by row and column, whose squares of patches become one vector by a convolution.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, D, p, m = cfg.dim, text_dim, cfg.patch_size, cfg.merge
        self.cfg, self.shape = cfg, (3, cfg.frames, p, p)
        self.patches = video_patches(cfg, bias=True, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
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


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                fields.MLP,
                *PATCHES,
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
        *names.under(layer, "blocks.{i}", "layers.{i}"),
        Weight("post_layernorm.weight", "norm.scale"),
        *names.linear("downsample", "join"),
        *names.linear("merger.proj", "enter"),
        *names.layer_norm("merger.post_projection_norm", "enter_norm"),
        *names.mlp("merger.{}_proj", "mlp"),
    ]
    return names.under(outer, "model.visual", "tower")
