"""Gemma 3 (Gemma team 2025, arXiv:2503.19786): five local layers for each global one, norms on queries and keys, and
an image encoder.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _gemma3_vision as vision
from maxlib.ops import LinearScaling, Rope
from maxlib.weights import Family, Field, Fields, HFConfig, Multimodal, Renamed, Table, fields, names

Vision = vision.Vision

LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Gemma 3; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope  # of the global layers
    local_rope: Rope
    window: int  # of the local layers
    layer_types: tuple[str, ...] | None = None  # LOCAL or GLOBAL for each layer; None: every sixth is global
    query_scalar: int = 256  # scores are divided by its square root
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False
    vision: Vision | None = None

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def types(self) -> tuple[str, ...]:
        """LOCAL or GLOBAL for each layer."""
        return self.layer_types or _pattern(self.num_layers)


def _pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers))


class Block(nn.Layer):
    """Sandwich norms, as in Gemma 2; the norms of queries and keys do what its soft caps did."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        mask, rope = _mask_and_rope(cfg, kind)
        self.attn_norm = _norm(cfg, cfg.dim)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=rope,
            q_norm=_norm(cfg, cfg.head_dim),
            k_norm=_norm(cfg, cfg.head_dim),
            scale=cfg.query_scalar**-0.5,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.attn_post_norm = _norm(cfg, cfg.dim)
        self.mlp_norm = _norm(cfg, cfg.dim)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = _norm(cfg, cfg.dim)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn", norm=self.attn_post_norm)
        return nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp", norm=self.mlp_post_norm), cache, {}


def _norm(cfg: Config, dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=cfg.norm_eps, plus_one=True)


def _mask_and_rope(cfg: Config, kind: str) -> tuple[ops.Mask, Rope]:
    # Tokens of one image attend to each other in both directions, within the window.
    both_ways = ops.Causal() | ops.BidirectionalBlocks()
    return (both_ways, cfg.rope) if kind == GLOBAL else (both_ways & ops.SlidingWindow(cfg.window), cfg.local_rope)


class Gemma3(nn.Decoder):
    """Gemma 3: only one layer of six caches the whole text; with `cfg.vision` it reads images.

    Local layers rotate with a base of 10k, global ones with 1M, which long texts stretch.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.types, rngs=rngs)
        self.norm = _norm(cfg, cfg.dim)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else cfg.vision.tower(rngs)
        self.projector = None if cfg.vision is None else cfg.vision.projector(cfg.dim, rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (vision_config := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.ImageInput(
                self.tower,
                self.projector,
                token=vision_config.image_token,
                num_tokens=vision_config.num_tokens,
                bidirectional=True,
            )
        }

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


CONTEXT = 131_072  # what configs that give no length mean
GELU = "gelu_pytorch_tanh"


def _by_period(hf: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := hf.take("sliding_window_pattern", 6)) < 1:
        if hf.take("layer_types", None) is not None:
            return ()  # the config says what each layer is, and the period counts for nothing
        raise ValueError(f"{hf.where('sliding_window_pattern')} must be at least 1, got {period}.")
    return _pattern(c.num_layers, period)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(layer_type=GLOBAL, default_theta=1e6, default_length=CONTEXT),
        fields.rope(
            "local_rope",
            layer_type=LOCAL,
            theta_field="rope_local_base_freq",
            scaling_field=None,
            default_length=CONTEXT,
        ),
        fields.WINDOW,
        fields.layer_types(LOCAL, GLOBAL, usual=lambda c: _pattern(c.num_layers), absent=_by_period),
        Field("query_scalar", "query_pre_attn_scalar"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gemma3_text": "Gemma3ForCausalLM"},
    fixed={"hidden_activation": GELU},
    fixed_if_present={
        "hidden_act": GELU,
        "use_bidirectional_attention": (None, False),
        "attn_logit_softcapping": (None, False),
        "final_logit_softcapping": (None, False),
    },
    ignored=["_sliding_window_pattern"],  # transformers 5 writes it beside layer_types, and never reads it
    absent={
        "vocab": 262_208,
        "num_layers": 26,
        "dim": 2304,
        "mlp_dim": 9216,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "window": 4096,
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
