"""Gemma 3 (Gemma team 2025, arXiv:2503.19786): five local layers for each global one, norms on queries and keys, and
an image encoder.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _gemma3_vision as vision
from maxlib.ops import LinearScaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, Renamed, Table, hf, hf_layer_types, hf_rope, names

Vision = vision.Vision

LOCAL, GLOBAL = "sliding_attention", "full_attention"
GELU = "gelu_pytorch_tanh"
CONTEXT = 131_072  # what configs that give no length mean


def _pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers))


def _by_period(fields: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := fields.take("sliding_window_pattern", 6)) < 1:
        if fields.take("layer_types", None) is not None:
            return ()  # the config says what each layer is, and the period counts for nothing
        raise ValueError(f"{fields.where('sliding_window_pattern')} must be at least 1, got {period}.")
    return _pattern(c.num_layers, period)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Gemma 3; `PRESETS` has the published ones. Multimodal checkpoints keep them in `text_config`."""

    model_types = ("gemma3_text",)
    architecture = "Gemma3ForCausalLM"
    fixed = {"hidden_activation": GELU}
    fixed_if_present = {
        "hidden_act": GELU,
        **dict.fromkeys(
            ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"), (None, False)
        ),
    }
    ignored = ("_sliding_window_pattern",)  # transformers 5 writes it beside layer_types, and never reads it

    vocab: int = hf("vocab_size", absent=262_208)
    num_layers: int = hf("num_hidden_layers", absent=26)
    dim: int = hf("hidden_size", absent=2304)
    mlp_dim: int = hf("intermediate_size", absent=9216)
    num_heads: int = hf("num_attention_heads", absent=8)
    num_kv_heads: int = hf("num_key_value_heads", absent=4)
    head_dim: int = hf("head_dim", absent=256)
    rope: Rope = hf_rope(layer_type=GLOBAL, default_theta=1e6, default_length=CONTEXT)  # of the global layers
    local_rope: Rope = hf_rope(
        layer_type=LOCAL, theta_field="rope_local_base_freq", scaling_field=None, default_length=CONTEXT
    )
    window: int = hf("sliding_window", absent=4096)  # of the local layers
    # LOCAL or GLOBAL for each layer; None: every sixth is global.
    layer_types: tuple[str, ...] | None = hf_layer_types(
        LOCAL, GLOBAL, usual=lambda c: _pattern(c.num_layers), absent=_by_period
    )
    query_scalar: int = hf("query_pre_attn_scalar", 256)  # scores are divided by its square root
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", True)
    attention_bias: bool = hf("attention_bias", False)
    vision: Vision | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """LOCAL or GLOBAL for each layer."""
        return self.layer_types or _pattern(self.num_layers)

    @property
    def kinds(self) -> dict[str, tuple[ops.Mask, Rope]]:
        """Mask and rotary embedding of either kind of layer."""
        # Tokens of one image attend to each other in both directions, within the window.
        both_ways = ops.Causal() | ops.BidirectionalBlocks()
        return {LOCAL: (both_ways & ops.SlidingWindow(self.window), self.local_rope), GLOBAL: (both_ways, self.rope)}

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", "gemma3_text", "gemma3") == "gemma3_text":
            return super().from_hf(fields)
        text = super().from_hf(fields.nested("text_config"))
        tied = fields.take("tie_word_embeddings", text.tied)
        return replace(text, vision=Vision.from_hf(fields), tied=tied)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        text = super().to_hf()
        if self.vision is None:
            return text
        del text["architectures"]
        sees = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
        return sees | {"text_config": text, "tie_word_embeddings": self.tied} | self.vision.to_hf()


class Block(nn.Layer):
    """Sandwich norms, as in Gemma 2; the norms of queries and keys do what its soft caps did."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        norm = lambda dim: nn.RMSNorm(dim, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm(D)
        norms: Any = dict(q_norm=norm(cfg.head_dim), k_norm=norm(cfg.head_dim))
        scale = cfg.query_scalar**-0.5
        self.attn = nn.Attention(
            D, **heads, mask=mask, rope=rope, **norms, scale=scale, bias=bias, out_bias=bias, rngs=rngs
        )
        self.attn_post_norm = norm(D)
        self.mlp_norm = norm(D)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = norm(D)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Gemma3(nn.Decoder):
    """Gemma 3: only one layer of six caches the whole text; with `cfg.vision` it reads images.

    Local layers rotate with a base of 10k, global ones with 1M, which long texts stretch.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = zip(*cfg.kinds.values(), strict=True)
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *cfg.kinds[kind], rngs=rngs), cfg.types, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else cfg.vision.tower(rngs)
        self.projector = None if cfg.vision is None else cfg.vision.projector(cfg.dim, rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (sees := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.ImageInput(
                self.tower, self.projector, token=sees.image_token, num_tokens=sees.num_tokens, bidirectional=True
            )
        }

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


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


def _ropes(head_dim: int, length: int, *, factor: float = 1.0) -> dict[str, Any]:
    scaling = None if factor == 1.0 else LinearScaling(factor)
    far = Rope(head_dim, 1_000_000.0, scaling, max_length=round(length * factor))
    return {"rope": far, "local_rope": Rope(head_dim, 10_000.0, max_length=length)}


# fmt: off
_1B = Config(
    vocab=262_144, num_layers=26, dim=1152, mlp_dim=6912, num_heads=4, num_kv_heads=1, head_dim=256, window=512,
    **_ropes(256, 32_768),
)
_4B = Config(
    vocab=262_208, num_layers=34, dim=2560, mlp_dim=10_240, num_heads=8, num_kv_heads=4, head_dim=256, window=1024,
    **_ropes(256, CONTEXT, factor=8.0), vision=Vision(),
)
PRESETS = {
    "gemma3-270m": replace(_1B, num_layers=18, dim=640, mlp_dim=2048),
    "gemma3-1b": _1B,
    "gemma3-4b": _4B,
    "gemma3-12b": replace(_4B, num_layers=48, dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma3-27b": replace(
        _4B, num_layers=62, dim=5376, mlp_dim=21_504, num_heads=32, num_kv_heads=16, head_dim=128, query_scalar=168,
        **_ropes(128, CONTEXT, factor=8.0),
    ),
}
# fmt: on

FAMILY = Family(
    name="gemma3", model=Gemma3, config=Config, table=_table, presets=PRESETS, model_types=("gemma3_text", "gemma3")
)
