"""Mistral 7B, Nemo, Small and Large (Jiang et al. 2023, arXiv:2310.06825): Llama's block, in the first release with a
window.

Ministral 3 and Devstral 2 sharpen late queries. They, Pixtral 12B and Small from 3.1 on see images of any size.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _mistral_config as shared
from maxlib.models import _pixtral_vision as vision
from maxlib.ops import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, Table, hf, hf_fields, names, rope_to_hf

Vision = vision.Vision


def _read_ministral(fields: HFConfig, c: Any) -> bool:
    return fields.require("model_type", *Config.model_types) == "ministral3"


def _write_ministral(value: bool, cfg: Any) -> dict[str, Any]:
    return {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]} if value else {}


def _read_rope(fields: HFConfig, c: Any) -> Rope:
    if c.ministral:
        shared.check_length(fields)
    return fields.rope(head_dim=c.head_dim)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Mistral; `PRESETS` has the published ones."""

    model_types = ("mistral", "ministral3")
    architecture = "MistralForCausalLM"
    fixed = {"hidden_act": "silu"}
    ignored = ("is_composition",)  # in Pixtral 12B: transformers 4.45 wrote it into all parts of a config

    ministral: bool = hf_fields(_read_ministral, _write_ministral, default=False)
    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=lambda c: 128 if c.ministral else c.dim // c.num_heads)
    rope: Rope = hf_fields(_read_rope, lambda rope, cfg: rope_to_hf(rope, head_dim=cfg.head_dim, whole_heads=True))
    sharpening: float = hf_fields(  # of late queries, in Ministral 3
        lambda fields, c: shared.read_sharpening(fields) if c.ministral else 0.0,
        lambda value, cfg: shared.written_sharpening(value) if cfg.ministral else {},
        default=0.0,
    )
    # None: every token attends to all earlier ones.
    window: int | None = hf("sliding_window", None, absent=lambda c: None if c.ministral else 4096)
    norm_eps: float = hf("rms_norm_eps", 1e-5, absent=lambda c: 1e-5 if c.ministral else 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    vision: Vision | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.ministral:
            shared.check_sharpened(self.rope, "ministral3")
        if self.sharpening and not self.ministral:
            raise ValueError(f"sharpening is Ministral 3's: give ministral=True, or 0 in place of {self.sharpening}")

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", *cls.model_types, *shared.VISION_TYPES) not in shared.VISION_TYPES:
            return super().from_hf(fields)
        return shared.read_seeing(fields, super().from_hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        return shared.written_seeing(super().to_hf(), self.vision)

    @property
    def temperature(self) -> nn.TemperatureTuning | None:
        """The factor on late queries: `1 + sharpening * log(1 + floor(index / length))`."""
        return shared.temperature(self.rope, self.sharpening)

    @property
    def mask(self) -> ops.Mask:
        # A token attends to itself and window - 1 earlier ones. After L layers information has moved L * window tokens.
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)


class Block(nn.Layer):
    """Llama's layer, under a mask that may have a window."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, how = cfg.dim, {"mask": cfg.mask, "rope": cfg.rope, "temperature": cfg.temperature}
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, **heads, **how, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Mistral(nn.Decoder):
    """Mistral: Llama with a sliding window in every layer of the first release, whose cache is a ring of that size.

    With `cfg.vision` it reads images of any size; their tokens count like those of text.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (cfg.mask,), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        sees: Any = dict(eps=cfg.norm_eps, rngs=rngs)
        self.tower = None if cfg.vision is None else vision.PixtralVision(cfg.vision, cfg.dim, **sees)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (sees := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.PatchInput(
                self.tower, tokens=(sees.image_token,), merge=sees.merge, patch_dim=sees.patch_dim
            )
        }


def _table(cfg: Config) -> Table:
    return shared.table([*names.NORMS, *names.ATTENTION, *names.MLP], cfg.vision)


# fmt: off
_7B = Config(
    vocab=32_000, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
)
_LONG = Rope(128, 1_000_000.0, max_length=131_072)
# A YaRN that leaves the size of queries and keys as it is.
_yarn = lambda factor, length: Yarn(factor, length, mscale=1.0, mscale_all_dim=1.0)
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

FAMILY = Family(
    name="mistral",
    model=Mistral,
    config=Config,
    table=_table,
    presets=PRESETS,
    model_types=(*Config.model_types, *shared.VISION_TYPES),
)
