"""Gemma 3 (Gemma team 2025, arXiv:2503.19786): five local layers for each global one, norms on queries and keys, and
an image encoder.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from flax import nnx

from maxlib import nn, ops
from maxlib.models import _gemma3_vision as vision
from maxlib.models._layers import GemmaDecoder, PreNorm, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, WindowSizes, every
from maxlib.ops import LinearScaling, Rope
from maxlib.weights import Family, Field, Fields, HFConfig, Multimodal, Renamed, Table, fields, names

Vision = vision.Vision

LOCAL, GLOBAL = SLIDING, FULL


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a Gemma 3; `PRESETS` has the published ones. Every sixth layer is GLOBAL, the others are LOCAL."""

    period: ClassVar[int] = 6

    mlp_dim: int
    rope: Rope  # of the global layers
    local_rope: Rope
    window: int = 4096  # of the local layers
    query_scalar: int = 256  # scores are divided by its square root
    tied: bool = True
    attention_bias: bool = False
    bidirectional: bool = False  # an encoder: tokens attend to later ones, local layers to half a window on each side
    vision: Vision | None = None


class Block(PreNorm):
    """Sandwich norms, as in Gemma 2; the norms of queries and keys do what its soft caps did."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        mask, rope = _mask_and_rope(cfg, kind)
        self.attn_norm = _norm(cfg, cfg.dim)
        self.attn = attention(
            cfg,
            mask=mask,
            rope=rope,
            qk_norm=True,
            plus_one=True,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            scale=cfg.query_scalar**-0.5,
            rngs=rngs,
        )
        self.attn_post_norm = _norm(cfg, cfg.dim)
        self.mlp_norm = _norm(cfg, cfg.dim)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = _norm(cfg, cfg.dim)


def _norm(cfg: Config, dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=cfg.norm_eps, plus_one=True)


def _mask_and_rope(cfg: Config, kind: str) -> tuple[ops.Mask, Rope]:
    if cfg.bidirectional:
        return (ops.Full(), cfg.rope) if kind == GLOBAL else (ops.LocalWindow(cfg.window // 2), cfg.local_rope)
    # Tokens of one image attend to each other in both directions, within the window.
    both_ways = ops.Causal() | ops.BidirectionalBlocks()
    return (both_ways, cfg.rope) if kind == GLOBAL else (both_ways & ops.SlidingWindow(cfg.window), cfg.local_rope)


class Gemma3(GemmaDecoder):
    """Gemma 3: only one layer of six caches the whole text; with `cfg.vision` it reads images.

    Local layers rotate with a base of 10k, global ones with 1M, which long texts stretch.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.types, rngs=rngs)
        self.tower = None if cfg.vision is None else vision.SigLIP(cfg.vision, rngs=rngs)
        self.projector = None if cfg.vision is None else vision.PoolProjector(cfg.vision, cfg.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        encoder = self.cfg.vision
        if encoder is None:
            return {}
        images = nn.vision.ImageInput(
            self.tower, self.projector, token=encoder.image_token, num_tokens=encoder.num_tokens, bidirectional=True
        )
        return {"images": images}


CONTEXT = 131_072  # what configs that give no length mean
GELU = "gelu_pytorch_tanh"


def _by_period(hf: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := hf.take("sliding_window_pattern", 6)) < 1:
        if hf.take("layer_types", None) is not None:
            return ()  # the config says what each layer is, and the period counts for nothing
        raise ValueError(f"{hf.where('sliding_window_pattern')} must be at least 1, got {period}.")
    return every(period, c.num_layers, LOCAL, GLOBAL)


TEXT = Fields(
    Config,
    [
        *DECODER,
        fields.rope(layer_type=GLOBAL, default_theta=1e6, default_length=CONTEXT),
        fields.rope(
            "local_rope",
            layer_type=LOCAL,
            theta_field="rope_local_base_freq",
            scaling_field=None,
            default_length=CONTEXT,
        ),
        fields.WINDOW,
        fields.layer_types(LOCAL, GLOBAL, usual=lambda c: every(6, c.num_layers, LOCAL, GLOBAL), absent=_by_period),
        Field("query_scalar", "query_pre_attn_scalar"),
        fields.ATTENTION_BIAS,
        Field("bidirectional", "use_bidirectional_attention"),
    ],
    model_types={"gemma3_text": "Gemma3ForCausalLM"},
    fixed={"hidden_activation": GELU},
    fixed_if_present={"hidden_act": GELU},
    ignored=["_sliding_window_pattern"],  # transformers 5 writes it beside layer_types, and never reads it
    absent={
        "vocab": 262_208,
        "num_layers": 26,
        "dim": 2304,
        "mlp_dim": 9216,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
    },
)
FIELDS = Multimodal(TEXT, {"vision": vision.FIELDS}, model_types={"gemma3": "Gemma3ForConditionalGeneration"})


def _table(cfg: Config) -> Table:
    layer = [*names.SANDWICH_NORMS, *names.ATTENTION, *names.MLP]
    if cfg.vision is None:
        return names.decoder_table(layer)
    # Vision checkpoints have a prefix, which transformers places differently in memory.
    renamed = [
        Renamed("lm_head.", "language_model.lm_head."),
        Renamed("model.language_model.", "language_model.model."),
    ]
    return [*names.decoder_table(layer, prefix="language_model."), *vision.table(), *renamed]


def _far(head_dim: int, length: int, factor: float = 1.0) -> Rope:
    scaling = None if factor == 1.0 else LinearScaling(factor)
    return Rope(head_dim, 1_000_000.0, scaling, max_length=round(length * factor))


# fmt: off
_1B = Config(
    vocab=262_144, num_layers=26, dim=1152, mlp_dim=6912, num_heads=4, num_kv_heads=1, head_dim=256, window=512,
    rope=_far(256, 32_768), local_rope=Rope(256, 10_000.0, max_length=32_768),
)
_4B = Config(
    vocab=262_208, num_layers=34, dim=2560, mlp_dim=10_240, num_heads=8, num_kv_heads=4, head_dim=256, window=1024,
    rope=_far(256, CONTEXT, 8.0), local_rope=Rope(256, 10_000.0, max_length=CONTEXT), vision=Vision(),
)
PRESETS = {
    "gemma3-270m": replace(_1B, num_layers=18, dim=640, mlp_dim=2048),
    "gemma3-1b": _1B,
    "gemma3-4b": _4B,
    "gemma3-12b": replace(_4B, num_layers=48, dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma3-27b": replace(
        _4B, num_layers=62, dim=5376, mlp_dim=21_504, num_heads=32, num_kv_heads=16, head_dim=128, query_scalar=168,
        rope=_far(128, CONTEXT, 8.0), local_rope=Rope(128, 10_000.0, max_length=CONTEXT),
    ),
}
# fmt: on

FAMILY = Family("gemma3", Gemma3, FIELDS, _table, PRESETS)
