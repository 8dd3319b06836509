"""GLM-4.5V (GLM-V team 2025, arXiv:2507.01006): GLM-4.5's text with experts, and images of any size.

Positions and images are those of GLM-4.1V; the first half of a head is rotated in halves, not in pairs of neighbours.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _glm_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention, deepseek_experts
from maxlib.models._qwen_vision import sections
from maxlib.models._sizes import ExpertSizes, SectionSizes
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Multimodal, Table, fields, names

Vision = vision.PositionedVision
SECTIONS = (8, 12, 12)  # of M-RoPE: pairs of a head that turn by time, row and column


@dataclass(frozen=True, kw_only=True)
class Config(SectionSizes, ExpertSizes):
    """Sizes of a GLM-4.5V; `PRESETS` has the published ones."""

    sections: tuple[int, ...] = SECTIONS
    norm_eps: float = 1e-5
    attention_bias: bool = True
    vision: Vision


class Block(PreNorm):
    """Llama's layer; from the `num_dense`th on with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.mrope, bias=cfg.attention_bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class GLM4VMoE(PatchReader, TextDecoder):
    """GLM-4.5V: GLM-4.5-Air that sees images of any size, frames of videos among them."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)
        self.tower = vision.PositionedEncoder(cfg.vision, cfg.dim, rngs=rngs)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.5),
        sections(SECTIONS, alternating=False),
        fields.NUM_SHARED,
        *fields.GROUPS,
        fields.ATTENTION_BIAS,
    ],
    model_types={"glm4v_moe_text": "Glm4vMoeTextModel"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"use_qk_norm": False},
    absent={"num_dense": 1, "head_dim": fields.equal_heads},
)
FIELDS = Multimodal(
    TEXT,
    {"vision": vision.positioned_fields(image_token=151_363, video_token=151_364)},
    model_types={"glm4v_moe": "Glm4vMoeForConditionalGeneration"},
    fixed={
        "vision_config.model_type": ("glm4v_moe_vision", "glm4v_moe"),  # the second as first written
        "vision_config.out_hidden_size": lambda c: c.dim,
    },
    text_alone=False,
)


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE]
    return [*names.decoder_table(layer, model="model.language_model"), *vision.table()]


# fmt: off
PRESETS = {
    "glm-4.5v-106b": Config(
        vocab=151_552, num_layers=46, num_dense=1, dim=4096, mlp_dim=10_944, expert_dim=1408, num_heads=96,
        num_kv_heads=8, head_dim=128, rope=Rope(64, 10_000.0, max_length=65_536), num_experts=128, num_shared=1, top_k=8,
        vision=Vision(mlp_dim=4096, projector_dim=10_944, image_token=151_363, video_token=151_364),
    ),
}
# fmt: on

FAMILY = Family("glm4v_moe", GLM4VMoE, FIELDS, _table, PRESETS)
