"""Kimi K2.5 to K2.7 (Moonshot AI 2026): Kimi K2, which is DeepSeek V3 in other sizes, with MoonViT, which encodes
images of any size.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import deepseek
from maxlib.models._vision import PLACEHOLDERS, PatchEncoder, PatchReader, RowByRow, bicubic
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Family, Field, Fields, Multimodal, Renamed, Table, Weight, fields, names

EPS = 1e-5  # of the encoder's norms


@dataclass(frozen=True, kw_only=True)
class Vision(RowByRow):
    """Sizes of the encoder, and the placeholder that stands for a square of patches."""

    dim: int = 1152
    num_layers: int = 27
    num_heads: int = 16
    mlp_dim: int = 4304
    side: int = 64  # of a square table of positions, resized for each image
    projector_eps: float = 1e-5
    image_token: int = 163_605
    video_token: int = 163_840
    start_token: int = 163_602
    end_token: int = 163_604

    @property
    def rope(self) -> ops.AxialRope:
        """The rotary embedding: pairs of neighbouring dimensions turn by column and row in turn."""
        return ops.AxialRope(self.head_dim, self.rope_theta, interleaved=True)


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """Sizes of a Kimi K2.5; `PRESETS` has the published ones."""

    vision: Vision


class MoonViT(PatchEncoder):
    """Image encoder with learned positions, which are resized for each image, and rotation by column and row.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, p, F = cfg.dim, cfg.patch_size, cfg.dim * cfg.merge**2
        self.cfg, self.shape = cfg, (3, p, p)
        axes = ("embed", "channel", "patch_row", "patch_column")
        self.patches = nn.Einsum("...Cab,DCab->...D", (E, 3, p, p), axes, bias=True, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        shape = (cfg.side, cfg.side, E)
        self.positions = nnx.Param(init(rngs.params(), shape, jnp.float32), axes=("position", "position", "embed"))

        def block(_: Any, rngs: nnx.Rngs) -> nn.vision.EncoderBlock:
            return nn.vision.EncoderBlock(E, cfg.mlp_dim, num_heads=cfg.num_heads, rope=cfg.rope, eps=EPS, rngs=rngs)

        self.layers = nn.Stack(block, cfg.num_layers, rngs=rngs)
        self.norm = nn.LayerNorm(E, eps=EPS)
        self.projector_norm = nn.LayerNorm(E, eps=cfg.projector_eps)
        self.up = nn.Einsum("...E,FE->...F", (F, F), ("mlp", "vision"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (text_dim, F), ("embed", "mlp"), bias=True, rngs=rngs)

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns `x` with its positions added."""
        return x + bicubic(constrain(self.positions[...], "position", "position", None), at, x.dtype)

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares."""
        # The patches of a square stand together: [R, P, E] -> [R, S, merge^2 * E]
        x = self.projector_norm(self.norm(x)).reshape(len(x), x.shape[1] // self.cfg.merge**2, -1)
        return self.down(exact_gelu(self.up(x)))


class KimiK25(PatchReader, deepseek.DeepSeek):
    """Kimi K2 that sees images of any size; positions count tokens. Videos, whose frames are joined, are not read."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.tower = MoonViT(cfg.vision, cfg.dim, rngs=rngs)


def _read_merge(hf: Any, c: Any) -> int:
    sides = hf.nested("vision_config").take("merge_kernel_size", [2, 2], kind=list)
    if len({*sides}) != 1 or len(sides) != 2:
        raise ValueError(f"{hf.where('vision_config.merge_kernel_size')} must be two equal numbers, got {sides}")
    return sides[0]


VISION = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                *fields.ENCODER,
                Field("patch_size"),
                Field("side", "pos_emb_height"),
            ],
        ),
        Computed("merge", _read_merge, lambda merge, cfg: {"vision_config.merge_kernel_size": [merge, merge]}),
        fields.axial_theta(10_000.0),
        Field("projector_eps", "projection_layer_norm_eps"),
        *PLACEHOLDERS,
    ],
    fixed={
        "vision_config.model_type": "kimi_k25_vision",
        "vision_config.hidden_act": "gelu_pytorch_tanh",
        "vision_config.pos_emb_width": lambda c: c.side,
        "projection_hidden_size": lambda c: c.dim,
    },
    ignored=["vision_config.pos_emb_time"],  # frames of a video that are joined
)
FIELDS = Multimodal(
    replace(
        deepseek.FIELDS, config=Config, model_types={"deepseek_v3": "DeepseekV3Model", "kimi_k2": "DeepseekV3Model"}
    ),
    {"vision": VISION},
    model_types={"kimi_k25": "Kimi_K25ForConditionalGeneration"},
    tied=True,
    text_alone=False,
)


def _table(cfg: Config) -> Table:
    """Maps the names of the release; transformers writes some others."""
    text = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    layer = [
        *names.layer_norm("norm0", "attn_norm"),
        *names.layer_norm("norm1", "mlp_norm"),
        *names.linear("mlp.fc0", "mlp.up"),
        *names.linear("mlp.fc1", "mlp.down"),
        *names.qkv("wqkv", "attn"),
        *names.heads_out("wo", "attn.o"),
    ]
    tower = "vision_tower"
    return [
        Renamed("language_model.model.blocks.", "language_model.model.layers."),
        Renamed(f"{tower}.encoder.patch_embed.", f"{tower}.patch_embed."),
        Renamed("model.mm_projector.", "mm_projector."),
        *names.decoder_table(text, prefix="language_model."),
        *names.linear(f"{tower}.patch_embed.proj", "tower.patches"),
        Weight(f"{tower}.patch_embed.pos_emb.weight", "tower.positions"),
        *names.under(layer, f"{tower}.encoder.blocks.{{i}}", "tower.layers.{i}"),
        *names.layer_norm(f"{tower}.encoder.final_layernorm", "tower.norm"),
        *names.layer_norm("mm_projector.pre_norm", "tower.projector_norm"),
        *names.linear("mm_projector.proj.0", "tower.up"),
        *names.linear("mm_projector.proj.2", "tower.down"),
    ]


_K2 = deepseek.PRESETS["kimi-k2"]
_SIZES = {field.name: getattr(_K2, field.name) for field in dataclass_fields(_K2)}
PRESETS = {"kimi-k2.5": Config(**_SIZES, vision=Vision())}

FAMILY = Family("kimi_k25", KimiK25, FIELDS, _table, PRESETS)
