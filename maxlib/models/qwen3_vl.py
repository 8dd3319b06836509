"""Qwen3-VL (Qwen team 2025, arXiv:2511.21631), dense and with experts: Qwen3's text, and images of any size.

Tokens have positions by time, row and column (M-RoPE). Features of three layers of the image encoder are added to the
tokens of images after the first three layers of text (deepstack).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from maxlib import nn
from maxlib.models import _qwen_vision as vision
from maxlib.models._layers import DeepstackPreNorm, TextDecoder, attention
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Computed, Convert, Family, Fields, HFConfig, Multimodal, Table, Weight, fields, names

Vision = vision.Vision


@dataclass(frozen=True, kw_only=True)
class Config(vision.DeepstackSizes):
    """Sizes of a Qwen3-VL; `PRESETS` has the published ones."""

    mlp_dim: int  # not used by models with experts
    expert_dim: int | None = None
    num_experts: int | None = None
    top_k: int | None = None


class Block(DeepstackPreNorm):
    """Qwen3's layer, with experts or with an MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.mrope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if cfg.num_experts is None else None
        self.moe: Any = None if cfg.num_experts is None else _experts(cfg, rngs=rngs)


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts, of which a token takes the best k. Files have experts transposed.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, weight_order="EIO", rngs=rngs)


class Qwen3VL(PatchReader, TextDecoder):
    """Qwen3-VL: Qwen3 that sees images of any size; frames of a video are images with their time in the text before."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.has_features, rngs=rngs)
        self.tower = vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)


DENSE, SPARSE = "qwen3_vl", "qwen3_vl_moe"


def _model_type(cfg: Any) -> str:
    return DENSE if cfg.num_experts is None else SPARSE


def _is_sparse(c: Any) -> bool:
    return c.model_type == f"{SPARSE}_text"


def _read_num_experts(hf: HFConfig, c: Any) -> int | None:
    if not _is_sparse(c):
        return None
    alias = "num_local_experts" in hf and "num_experts" not in hf
    return hf.take("num_local_experts" if alias else "num_experts", kind=int)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        fields.only_if(_is_sparse, "expert_dim", "moe_intermediate_size", kind=int),
        Computed("num_experts", _read_num_experts, lambda value, cfg: {} if value is None else {"num_experts": value}),
        fields.only_if(_is_sparse, "top_k", "num_experts_per_tok", kind=int),
        *fields.ATTENTION,
        fields.rope(default_theta=500_000.0, default_length=128_000),
        vision.sections(vision.SECTIONS),
        fields.ATTENTION_BIAS,
    ],
    model_types={f"{DENSE}_text": "Qwen3VLTextModel", f"{SPARSE}_text": "Qwen3VLMoeTextModel"},
    model_type=lambda cfg: f"{_model_type(cfg)}_text",
    fixed={"hidden_act": "silu"},
    # transformers renormalises weights of experts whatever the releases say of it.
    fixed_if_present={"norm_topk_prob": True},
    absent={"vocab": 151_936, "head_dim": lambda c: 128 if c.num_experts is None else c.dim // c.num_heads},
)
FIELDS = Multimodal(
    TEXT,
    {"vision": replace(vision.FIELDS, absent={"deepstack": fields.REQUIRED})},
    model_types={DENSE: "Qwen3VLForConditionalGeneration", SPARSE: "Qwen3VLMoeForConditionalGeneration"},
    model_type=_model_type,
    fixed={
        "vision_config.model_type": lambda c: (
            f"{_model_type(c)}_vision",
            _model_type(c),
        ),  # the second as first written
        "vision_config.out_hidden_size": lambda c: c.dim,
    },
    tied=False,  # the text's own counts for nothing
    text_alone=False,
)
PREFIX = "model.language_model"  # before names of text


def _experts_table(cfg: Any) -> tuple[list[Weight], list[Convert]]:
    """Lists what a layer's experts are called, and how they are read.

    Releases have them transposed, `E D 2F` and `E F D`. transformers writes `E 2F D` and `E D F` under the same names,
    and reads both: what has not the shape that it would write is transposed. So does this; exports are like releases,
    but for sizes with which that could not be told.
    """
    D, F, gate_up, down = cfg.dim, cfg.expert_dim, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    halves = "E D (two F) -> E D F" if D != 2 * F else "E (two F) D -> E D F"
    entries = [
        Weight(gate_up, "moe.gate.w", halves, at={"two": 0}),
        Weight(gate_up, "moe.up.w", halves, at={"two": 1}),
        Weight(down, "moe.down.w", "E F D -> E F D" if D != F else "E D F -> E F D"),
    ]
    loads = {
        "gate": (gate_up, lambda both: _turned(both, 2 * F)[:, :, :F]),
        "up": (gate_up, lambda both: _turned(both, 2 * F)[:, :, F:]),
        "down": (down, lambda matrix: _turned(matrix, D)),
    }
    return entries, [
        Convert((f"{PREFIX}.layers.{{i}}.{hf_name}",), f"layers.{{i}}.moe.{part}.w", load, batch=1, dtype=None)
        for part, (hf_name, load) in loads.items()
    ]


def _turned(x: np.ndarray, rows: int) -> np.ndarray:
    return x.swapaxes(1, 2) if x.shape[1] == rows else x


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, Weight("mlp.gate.weight", "moe.router.gate.w")]
    experts, either_way = ([], []) if cfg.num_experts is None else _experts_table(cfg)
    return [*names.decoder_table([*layer, *experts], model=PREFIX), *either_way, *vision.table()]


# fmt: off
_LARGE = Vision(
    deepstack=(8, 16, 24), image_token=151_655, video_token=151_656, start_token=151_652, end_token=151_653,
)
_SMALL = replace(_LARGE, dim=1024, num_layers=24, mlp_dim=4096, deepstack=(5, 11, 17))
_8B = Config(
    vocab=151_936, num_layers=36, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 5_000_000.0, max_length=262_144), vision=_LARGE,
)
_30B = replace(
    _8B, num_layers=48, dim=2048, mlp_dim=6144, num_kv_heads=4, expert_dim=768, num_experts=128, top_k=8,
)
PRESETS = {
    "qwen3-vl-2b": replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16, tied=True, vision=_SMALL),
    "qwen3-vl-4b": replace(_8B, dim=2560, mlp_dim=9728, tied=True, vision=_SMALL),
    "qwen3-vl-8b": _8B,
    "qwen3-vl-32b": replace(_8B, num_layers=64, dim=5120, mlp_dim=25_600, num_heads=64),
    "qwen3-vl-30b-a3b": _30B,
    "qwen3-vl-235b-a22b": replace(
        _30B, num_layers=94, dim=4096, mlp_dim=12_288, num_heads=64, expert_dim=1536,
    ),
}
# fmt: on

FAMILY = Family("qwen3_vl", Qwen3VL, FIELDS, _table, PRESETS)
