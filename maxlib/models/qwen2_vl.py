"""Qwen2-VL (Qwen team 2024, arXiv:2409.12191) and Qwen2.5-VL (2025, arXiv:2502.13923): Qwen2's text, and images of
any size.

Tokens have positions by time, row and column (M-RoPE), each of which rotates a section of a head.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _qwen2_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import SectionSizes
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Fields, HFConfig, Multimodal, Renamed, Table, fields, names

Vision = vision.Vision
SECTIONS = (16, 24, 24)  # of M-RoPE: pairs of a head that turn by time, row and column


@dataclass(frozen=True, kw_only=True)
class Config(SectionSizes):
    """Sizes of a Qwen2-VL; `PRESETS` has the published ones. With windows in its encoder it is a Qwen2.5-VL."""

    mlp_dim: int
    sections: tuple[int, ...] = SECTIONS
    vision: Vision


class Block(PreNorm):
    """Qwen2's layer: Llama's with biases of queries, keys and values."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.mrope, bias=True, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class Qwen2VL(PatchReader, TextDecoder):
    """Qwen2-VL and Qwen2.5-VL: Qwen2 that sees images of any size, and videos as images in a row."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.tower = vision.Qwen2Vision(cfg.vision, cfg.dim, rngs=rngs)


PLAIN, WINDOWED = "qwen2_vl", "qwen2_5_vl"


def _model_type(cfg: Any) -> str:
    return PLAIN if cfg.vision.window is None else WINDOWED


def _rope_fields(hf: HFConfig) -> dict[str, Any]:
    """Returns the fields of the rope without those of M-RoPE, whose type "mrope" rotates as the default one."""
    read = {name: hf.take(name, None, kind=object) for name in ("rope_theta", "max_position_embeddings")}
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.take(name, None, kind=dict) or {}
        read[name] = {k: v for k, v in rope.items() if k != "mrope_section" and v != "mrope"}
    return {name: value for name, value in read.items() if value not in (None, {})}


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    copy = HFConfig(_rope_fields(hf))
    rope = fields.read_rope(copy, head_dim=c.head_dim, default_theta=1_000_000.0, default_length=32_768)
    copy.done()
    return rope


def _read_sections(hf: HFConfig, c: Any) -> tuple[int, ...]:
    value = SECTIONS
    for name in ("rope_scaling", "rope_parameters"):
        value = tuple((hf.take(name, None, kind=dict) or {}).get("mrope_section", value))
    return value


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    written = fields.write_rope(rope, head_dim=cfg.head_dim, whole_heads=True)
    sections = {"mrope_section": list(cfg.sections)}
    parameters = written.pop("rope_parameters") | sections
    return written | {"rope_parameters": parameters, "rope_scaling": sections | {"type": "mrope"}}


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        Computed("rope", _read_rope, _write_rope),
        Computed("sections", _read_sections, lambda value, cfg: {}),
    ],
    model_types={f"{kind}_text": f"{name}TextModel" for kind, name in ((PLAIN, "Qwen2VL"), (WINDOWED, "Qwen2_5_VL"))},
    model_type=lambda cfg: f"{_model_type(cfg)}_text",
    fixed={"hidden_act": "silu"},
    # With windows, versions of transformers disagree on which layers slide; no release has them.
    fixed_if_present={"layer_types": lambda c: ["full_attention"] * c.num_layers},
    ignored=("sliding_window", "max_window_layers"),  # of models with windows
    absent={"norm_eps": 1e-5},
)
# Names of the text's fields, which releases have at the top.
FLAT = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
}


class _VisionFields:
    """How a config.json spells the encoder of either generation."""

    def read(self, hf: HFConfig) -> Vision:
        is_windowed = hf.take("model_type") == WINDOWED
        return (vision.WITH_WINDOWS if is_windowed else vision.WITHOUT_WINDOWS).read(hf)

    def write(self, value: Vision) -> dict[str, Any]:
        return (vision.WITHOUT_WINDOWS if value.window is None else vision.WITH_WINDOWS).write(value)


class _Fields(Multimodal):
    """`Multimodal` whose text may also be described at the top, as in the releases."""

    def read(self, hf: HFConfig) -> Config:
        if "text_config" in hf:
            return super().read(hf)
        flat = hf.unread()
        text = {name: value for name, value in flat.items() if name in FLAT}
        others = {name: value for name, value in flat.items() if name not in FLAT}
        nested = HFConfig(others | {"text_config": text | {"model_type": f"{hf.take('model_type')}_text"}})
        cfg = super().read(nested)
        unread = {name.partition(".")[0] for name in nested.unread()}
        hf.ignore(*(flat.keys() - unread))
        return cfg

    def write(self, cfg: Any) -> dict[str, Any]:
        written = super().write(cfg)
        # Qwen2-VL calls the width of the text `hidden_size` of the encoder, too.
        width = "hidden_size" if cfg.vision.window is None else "out_hidden_size"
        written["vision_config"] |= {width: cfg.dim, "model_type": f"{_model_type(cfg)}_vision"}
        return written


FIELDS = _Fields(
    TEXT,
    {"vision": _VisionFields()},
    model_types={PLAIN: "Qwen2VLForConditionalGeneration", WINDOWED: "Qwen2_5_VLForConditionalGeneration"},
    model_type=_model_type,
    fixed_if_present={
        "vision_config.model_type": lambda c: (
            f"{_model_type(c)}_vision",
            _model_type(c),
        ),  # the second as first written
        "vision_config.out_hidden_size": lambda c: c.dim,
        "vision_config.hidden_size": lambda c: c.dim if c.vision.window is None else c.vision.dim,
    },
    text_alone=False,
)


def _table(cfg: Config) -> Table:
    text = names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])
    # As transformers 5 calls them in memory.
    renamed = [Renamed("model.visual.", "visual."), Renamed("model.language_model.", "model.")]
    return [*renamed, *text, *vision.table(cfg.vision)]


# fmt: off
_PLAIN = Vision(image_token=151_655, video_token=151_656, start_token=151_652, end_token=151_653)
_WINDOWED = replace(_PLAIN, mlp_dim=3420, window=112, full_layers=(7, 15, 23, 31), frame_step=2)
_WIDE = replace(_WINDOWED, mlp_dim=3456)
_7B = Config(
    vocab=152_064, num_layers=28, dim=3584, mlp_dim=18_944, num_heads=28, num_kv_heads=4, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768), vision=_PLAIN,
)
_72B = replace(_7B, num_layers=80, dim=8192, mlp_dim=29_568, num_heads=64, num_kv_heads=8)
_LONG = Rope(128, 1_000_000.0, max_length=128_000)
PRESETS = {
    "qwen2-vl-2b": replace(
        _7B, vocab=151_936, dim=1536, mlp_dim=8960, num_heads=12, num_kv_heads=2, tied=True,
    ),
    "qwen2-vl-7b": _7B,
    "qwen2-vl-72b": _72B,
    "qwen2.5-vl-3b": replace(
        _7B, vocab=151_936, num_layers=36, dim=2048, mlp_dim=11_008, num_heads=16, num_kv_heads=2, tied=True, rope=_LONG,
        vision=_WINDOWED,
    ),
    "qwen2.5-vl-7b": replace(_7B, rope=_LONG, vision=_WINDOWED),
    "qwen2.5-vl-32b": replace(
        _7B, num_layers=64, dim=5120, mlp_dim=27_648, num_heads=40, num_kv_heads=8, rope=_LONG, vision=_WIDE,
    ),
    "qwen2.5-vl-72b": replace(_72B, rope=_LONG, vision=_WIDE),
}
# fmt: on

FAMILY = Family("qwen2_vl", Qwen2VL, FIELDS, _table, PRESETS)
