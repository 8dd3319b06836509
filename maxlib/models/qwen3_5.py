"""Qwen3.5 (Qwen team 2026), dense and with experts: three layers of linear attention (gated DeltaNet), then one of
attention whose output is multiplied by a gate.

It takes images of any size. Image tokens have positions by time, row and column (M-RoPE); text tokens have three equal
positions, which is plain RoPE. The module that predicts a second token ahead (multi-token prediction) is loaded only
with `num_mtp=1`; it takes text only.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from flax import nnx

from maxlib import nn, ops
from maxlib.models import _qwen_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention, delta_net, gated_shared_experts
from maxlib.models._sizes import AttentionSizes, DeltaSizes, MTPSizes, by_interval, delta_net_names, every
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Ignore, Multimodal, Renamed, Table, fields, names

Vision = vision.Vision
LINEAR, FULL = "linear_attention", "full_attention"
SECTIONS = (11, 11, 10)  # rotated pairs of a head that M-RoPE turns by time, by row and by column


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, DeltaSizes, MTPSizes):
    """Sizes of a Qwen3.5; `PRESETS` has the published ones, `_sizes.py` the fields that other families have too.

    A model has an MLP in every layer (`mlp_dim`) or experts in every layer (the next four fields).
    """

    mlp_dim: int | None = None
    expert_dim: int | None = None
    shared_dim: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    renormalize: ClassVar[bool] = True  # the weights of a token's experts sum to one, in every Qwen3.5
    sections: tuple[int, ...] = SECTIONS
    num_key_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    layer_types: tuple[str, ...] | None = None  # LINEAR or FULL for each layer; None: every fourth is FULL
    attention_bias: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    vision: Vision | None = None

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.num_mtp not in (0, 1):
            raise ValueError(f"num_mtp must be 0 or 1, the one module of the releases, got {self.num_mtp}")
        if self.vision is not None and self.vision.deepstack:
            raise ValueError(f"deepstack (deepstack_visual_indexes) must be empty, got {self.vision.deepstack}")
        _rotary(self)  # MRope checks the sections


class Block(PreNorm):
    """Mixes tokens by linear attention or attention, then passes each through experts or an MLP.

    `PreNorm` (`_layers.py`) has the forward pass. With `plus_one`, norms multiply by one plus their weight.
    """

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = delta_net(cfg, norm_eps=cfg.norm_eps, rngs=rngs) if kind == LINEAR else None
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp: Any = None if cfg.mlp_dim is None else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = None if cfg.num_experts is None else gated_shared_experts(cfg, rngs=rngs)


def _rotary(cfg: Config) -> Rope | ops.MRope:
    # A vision model has three positions per token (M-RoPE), a text model has one.
    return cfg.rope if cfg.vision is None else ops.MRope(cfg.rope, cfg.sections)


def _usual_types(c: Any) -> tuple[str, ...]:
    """Returns the types of layers in the releases: every fourth has full attention."""
    return every(4, c.num_layers, LINEAR, FULL)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    # The rope rotates the first quarter of each head. The output of attention, [B, T, N, H], is multiplied by the
    # sigmoid of a projection of x to the same shape.
    return attention(
        cfg,
        rope=_rotary(cfg),
        qk_norm=True,
        plus_one=True,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        out_gate_act=jax.nn.sigmoid,
        rngs=rngs,
    )


class Qwen35(PatchReader, TextDecoder):
    """Qwen3.5: every fourth layer caches keys and values, the others a state of fixed size (`nn.GatedDeltaNet`).

    With `cfg.vision` it is a vision model, whose encoder is `tower`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(
            cfg,
            lambda kind, rngs: Block(cfg, kind, rngs=rngs),
            cfg.layer_types or _usual_types(cfg),
            plus_one=True,
            rngs=rngs,
        )
        self.tower = None if cfg.vision is None else vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)
        blocks = [Block(cfg, FULL, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List(
            [nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, plus_one=True, rngs=rngs) for block in blocks]
        )


DENSE, SPARSE = "qwen3_5", "qwen3_5_moe"


def _is_dense(c: Any) -> bool:
    return c.model_type == f"{DENSE}_text"


def _is_sparse(c: Any) -> bool:
    return c.model_type == f"{SPARSE}_text"


def _model_type(cfg: Any) -> str:
    return DENSE if cfg.num_experts is None else SPARSE


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.only_if(_is_dense, "mlp_dim", "intermediate_size", 12_288),
        fields.only_if(_is_sparse, "expert_dim", "moe_intermediate_size", 512),
        fields.only_if(_is_sparse, "shared_dim", "shared_expert_intermediate_size", 512),
        fields.only_if(_is_sparse, "num_experts", "num_experts", 256),
        fields.only_if(_is_sparse, "top_k", "num_experts_per_tok", 8),
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.25),
        vision.sections(SECTIONS),
        *fields.LINEAR_ATTENTION,
        fields.layer_types(LINEAR, FULL, usual=_usual_types, absent=by_interval(LINEAR, FULL)),
        fields.ATTENTION_BIAS,
        fields.mtp(absent=0, hf_name="mtp_num_hidden_layers"),
    ],
    model_types={f"{DENSE}_text": "Qwen3_5ForCausalLM", f"{SPARSE}_text": "Qwen3_5MoeForCausalLM"},
    model_type=lambda cfg: f"{_model_type(cfg)}_text",
    fixed={"hidden_act": "silu"},
    fixed_if_present={"attn_output_gate": True, "mtp_use_dedicated_embeddings": False},
    ignored=["mamba_ssm_dtype"],  # the dtype of the state
    absent={"head_dim": 256, "num_value_heads": 32},
)
# The config.json of a vision model has the sizes of text in `text_config`, those of its encoder in `vision_config`.
FIELDS = Multimodal(
    TEXT,
    {"vision": vision.FIELDS},
    model_types={DENSE: "Qwen3_5ForConditionalGeneration", SPARSE: "Qwen3_5MoeForConditionalGeneration"},
    model_type=_model_type,
    fixed={
        # Any of these is read, and the first is written. The first releases have no "_vision".
        "vision_config.model_type": lambda c: (
            *(f"{_model_type(c)}_vision", f"{DENSE}_vision", f"{SPARSE}_vision"),
            *(DENSE, SPARSE),
        ),
        "vision_config.out_hidden_size": lambda c: c.dim,
    },
)


def _table(cfg: Config) -> Table:
    # Entries for parts that a layer lacks (attention or DeltaNet, experts or an MLP) are ignored.
    layer = [*names.NORMS, *names.gated_attention(cfg.head_dim), *delta_net_names(cfg)]
    layer += [*names.MLP, *names.EXPERTS, *names.GATED_SHARED_EXPERT]
    mtp = names.qwen_mtp_table(layer, used=cfg.num_mtp)
    if cfg.vision is None:
        # A text model can also be loaded from a vision model's checkpoint.
        without_vision = [Renamed("model.language_model.", "model."), Ignore("model.visual.*")]
        return [*names.decoder_table(layer), *names.fused_experts("model"), *without_vision, *mtp]
    text = "model.language_model"
    return [*names.decoder_table(layer, model=text), *names.fused_experts(text), *vision.table(), *mtp]


_VISION = Vision(image_token=248_056, video_token=248_057, start_token=248_053, end_token=248_054)
_SMALL = replace(_VISION, dim=1024, num_layers=24, mlp_dim=4096)

# fmt: off
_9B = Config(
    vocab=248_320, num_layers=32, dim=4096, mlp_dim=12_288, num_heads=16, num_kv_heads=4, head_dim=256,
    rope=Rope(64, 10_000_000.0, max_length=262_144), num_value_heads=32, vision=_VISION,
)
_27B = replace(_9B, num_layers=64, dim=5120, mlp_dim=17_408, num_heads=24, num_value_heads=48)
_35B = replace(
    _9B, num_layers=40, dim=2048, mlp_dim=None, num_kv_heads=2, expert_dim=512, shared_dim=512, num_experts=256, top_k=8,
)
PRESETS = {
    "qwen3.5-0.8b": replace(
        _9B, num_layers=24, dim=1024, mlp_dim=3584, num_heads=8, num_kv_heads=2, num_value_heads=16, tied=True,
        vision=replace(_VISION, dim=768, num_layers=12, num_heads=12, mlp_dim=3072),
    ),
    "qwen3.5-2b": replace(
        _9B, num_layers=24, dim=2048, mlp_dim=6144, num_heads=8, num_kv_heads=2, num_value_heads=16, tied=True,
        vision=_SMALL,
    ),
    "qwen3.5-4b": replace(_9B, dim=2560, mlp_dim=9216, tied=True, vision=_SMALL),
    "qwen3.5-9b": _9B,
    "qwen3.5-27b": _27B, "qwen3.6-27b": _27B, "qwen3.8-27b": _27B,
    "qwen3.5-35b-a3b": _35B, "qwen3.6-35b-a3b": _35B,
    "qwen3.5-122b-a10b": replace(
        _35B, num_layers=48, dim=3072, num_heads=32, num_value_heads=64, expert_dim=1024, shared_dim=1024,
    ),
    "qwen3.5-397b-a17b": replace(
        _35B, num_layers=60, dim=4096, num_heads=32, num_value_heads=64, expert_dim=1024, shared_dim=1024,
        num_experts=512, top_k=10,
    ),
}
# fmt: on

FAMILY = Family("qwen3_5", Qwen35, FIELDS, _table, PRESETS)
