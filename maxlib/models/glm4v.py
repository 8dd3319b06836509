"""GLM-4.1V (GLM-V team 2025, arXiv:2507.01006): GLM-4-0414's text, and images of any size.

Tokens have positions by time, row and column (M-RoPE), each of which rotates a section of the first half of a head.
Frames of videos are images with their time in the text before.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _glm_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._qwen_vision import sections
from maxlib.models._sizes import SectionSizes
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Multimodal, Table, fields, names

Vision = vision.PositionedVision
SECTIONS = (8, 12, 12)  # of M-RoPE: pairs of a head that turn by time, row and column


@dataclass(frozen=True, kw_only=True)
class Config(SectionSizes):
    """Sizes of a GLM-4.1V; `PRESETS` has the published ones."""

    mlp_dim: int
    sections: tuple[int, ...] = SECTIONS
    norm_eps: float = 1e-5
    vision: Vision


class Block(PreNorm):
    """GLM-4-0414's layer: Llama's with norms after the branches, and biases of queries, keys and values."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.mrope, bias=True, rngs=rngs)
        self.attn_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps)


class GLM4V(PatchReader, TextDecoder):
    """GLM-4.1V: GLM-4 that sees images of any size, frames of videos among them."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.tower = vision.PositionedEncoder(cfg.vision, cfg.dim, rngs=rngs)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(interleaved=True, partial=True),
        sections(SECTIONS, alternating=False),
    ],
    model_types={"glm4v_text": "Glm4vTextModel"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"attention_bias": True, "head_dim": fields.equal_heads},
    absent={"num_kv_heads": 2},
)
FIELDS = Multimodal(
    TEXT,
    {"vision": vision.positioned_fields(image_token=151_343, video_token=151_344)},
    model_types={"glm4v": "Glm4vForConditionalGeneration"},
    fixed={
        "vision_config.model_type": ("glm4v_vision", "glm4v"),  # the second as first written
        "vision_config.out_hidden_size": lambda c: c.dim,
    },
    text_alone=False,
)
PREFIX = "model.language_model"  # before names of text


def _table(cfg: Config) -> Table:
    norms = names.norms(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
    mlp = [*names.gate_up("mlp.gate_up_proj", "mlp"), *names.linear("mlp.down_proj", "mlp.down")]
    return [*names.decoder_table([*names.NORMS, *norms, *names.ATTENTION, *mlp], model=PREFIX), *vision.table()]


# fmt: off
PRESETS: dict[str, Any] = {
    "glm-4.1v-9b": Config(
        vocab=151_552, num_layers=40, dim=4096, mlp_dim=13_696, num_heads=32, num_kv_heads=2, head_dim=128,
        rope=Rope(64, 10_000.0, interleaved=True, max_length=65_536), vision=Vision(mlp_dim=4096),
    ),
}
# fmt: on

FAMILY = Family("glm4v", GLM4V, FIELDS, _table, PRESETS)
