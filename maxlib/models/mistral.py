"""Mistral 7B, Nemo, Small and Large (Jiang et al. 2023, arXiv:2310.06825): Llama's block, in the first release with a
window.

Ministral 3 and Devstral 2 sharpen late queries. They, Pixtral 12B and Small from 3.1 on see images of any size.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _mistral_config as shared
from maxlib.models import _pixtral_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, causal
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Family, Fields, HFConfig, Multimodal, Table, fields, names

Vision = vision.Vision


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Mistral; `PRESETS` has the published ones."""

    ministral: bool = False
    mlp_dim: int
    sharpening: float = 0.0  # of late queries, in Ministral 3
    # None: every token attends to all earlier ones.
    window: int | None = None
    norm_eps: float = 1e-5
    vision: Vision | None = None

    def __post_init__(self):
        if self.ministral:
            shared.check_sharpened(self.rope, "ministral3")
        if self.sharpening and not self.ministral:
            raise ValueError(f"sharpening is Ministral 3's: give ministral=True, or 0 in place of {self.sharpening}")

    @property
    def temperature(self) -> nn.TemperatureTuning | None:
        """The factor on late queries: `1 + sharpening * log(1 + floor(index / length))`."""
        return shared.temperature(self.rope, self.sharpening)


class Block(PreNorm):
    """Llama's layer, under a mask that may have a window."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=causal(cfg.window), rope=cfg.rope, temperature=cfg.temperature, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Mistral(PatchReader, TextDecoder):
    """Mistral: Llama with a sliding window in every layer of the first release, whose cache is a ring of that size.

    With `cfg.vision` it reads images of any size; their tokens count like those of text.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.tower = (
            None if cfg.vision is None else vision.PixtralVision(cfg.vision, cfg.dim, eps=cfg.norm_eps, rngs=rngs)
        )


_ROPE = fields.rope()


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    if c.ministral:
        shared.check_length(hf)
    return _ROPE.read(hf, c)


TEXT = Fields(
    Config,
    [
        Computed("ministral", lambda hf, c: c.model_type == "ministral3", lambda value, cfg: {}),
        *DECODER,
        Computed("rope", _read_rope, _ROPE.write),
        Computed(
            "sharpening",
            lambda hf, c: shared.read_sharpening(hf) if c.ministral else 0.0,
            lambda value, cfg: shared.written_sharpening(value) if cfg.ministral else {},
        ),
        fields.WINDOW,
    ],
    model_types={"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    model_type=lambda cfg: "ministral3" if cfg.ministral else "mistral",
    fixed={"hidden_act": "silu"},
    absent={
        "head_dim": lambda c: 128 if c.ministral else c.dim // c.num_heads,
        "window": lambda c: None if c.ministral else 4096,
        "norm_eps": lambda c: 1e-5 if c.ministral else 1e-6,
    },
)
FIELDS = Multimodal(
    TEXT, {"vision": vision.FIELDS}, model_types=shared.VISION_TYPES, model_type=lambda cfg: cfg.vision.kind
)


def _table(cfg: Config) -> Table:
    return shared.table([*names.NORMS, *names.ATTENTION, *names.MLP], cfg.vision)


# A YaRN that leaves the size of queries and keys as it is.
def _yarn(factor: float, length: int) -> YarnScaling:
    return YarnScaling(factor, length, mscale=1.0, mscale_all_dim=1.0)


# fmt: off
_7B = Config(
    vocab=32_000, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
)
_LONG = Rope(128, 1_000_000.0, max_length=131_072)
_MINISTRAL = replace(
    _7B, ministral=True, vocab=131_072, num_layers=34, sharpening=0.1, vision=Vision(),
    rope=Rope(128, 1_000_000.0, _yarn(16.0, 16_384), max_length=262_144),
)
_24B = replace(_7B, vocab=131_072, num_layers=40, dim=5120, mlp_dim=32_768)
_SMALL_31 = replace(_24B, rope=Rope(128, 1_000_000_000.0, max_length=131_072), vision=Vision())
PRESETS = {
    "mistral-7b-v0.1": replace(_7B, rope=Rope(128, 10_000.0, max_length=32_768), window=4096),
    "mistral-7b-v0.2": _7B,
    "mistral-7b-v0.3": replace(_7B, vocab=32_768),
    "mistral-nemo-12b": replace(_7B, vocab=131_072, num_layers=40, dim=5120, rope=_LONG),
    "pixtral-12b": replace(
        _7B, vocab=131_072, num_layers=40, dim=5120, rope=Rope(128, 1_000_000_000.0, max_length=1_024_000),
        vision=Vision(kind=vision.PLAIN, merge=1, patch_size=16, image_size=1024, bias=True),
    ),
    "mistral-small-22b": replace(_7B, vocab=32_768, num_layers=56, dim=6144, mlp_dim=16_384, num_heads=48),
    "mistral-small-24b": replace(_24B, rope=Rope(128, 100_000_000.0, max_length=32_768)),
    "mistral-small-3.1-24b": _SMALL_31,
    "mistral-small-3.2-24b": _SMALL_31,
    "mistral-large-123b": replace(
        _7B, vocab=32_768, num_layers=88, dim=12_288, mlp_dim=28_672, num_heads=96, rope=_LONG
    ),
    "ministral-3-3b": replace(_MINISTRAL, num_layers=26, dim=3072, mlp_dim=9216, tied=True),
    "ministral-3-8b": _MINISTRAL,
    "ministral-3-14b": replace(
        _MINISTRAL, num_layers=40, dim=5120, mlp_dim=16_384, rope=replace(_MINISTRAL.rope, theta=1_000_000_000.0)
    ),
    "devstral-small-2-24b": replace(
        _24B, ministral=True, sharpening=0.1, vision=Vision(),
        rope=Rope(128, 100_000_000.0, _yarn(48.0, 8192), max_length=393_216),
    ),
}
# fmt: on

FAMILY = Family("mistral", Mistral, FIELDS, _table, PRESETS)
