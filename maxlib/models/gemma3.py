"""Gemma 3: five local layers to a global one, normed queries and keys, images in (Gemma team 2025,
arXiv:2503.19786).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _gemma3_vision as sight
from maxlib.ops._rope import LinearScaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Renamed, Table, Weight, names, rope_to_hf, written

Vision = sight.Vision

LOCAL, GLOBAL = "sliding_attention", "full_attention"
GELU = "gelu_pytorch_tanh"
CONTEXT = 131_072  # what configs that give no length mean


def _pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers))


# Our fields of a text model, theirs, and what the configs of models that see mean by leaving one out.
TEXT = {
    "vocab": ("vocab_size", 262_208),
    "num_layers": ("num_hidden_layers", 26),
    "dim": ("hidden_size", 2304),
    "mlp_dim": ("intermediate_size", 9216),
    "num_heads": ("num_attention_heads", 8),
    "num_kv_heads": ("num_key_value_heads", 4),
    "head_dim": ("head_dim", 256),
    "window": ("sliding_window", 4096),
    "query_scalar": ("query_pre_attn_scalar", 256),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", True),
    "attention_bias": ("attention_bias", False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Gemma 3 from another; `PRESETS` has the published ones."""

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
    layer_types: tuple[str, ...] | None = None  # LOCAL or GLOBAL each; None: every sixth is global
    query_scalar: int = 256  # scores are multiplied by its inverse square root
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False
    vision: Vision | None = None

    @property
    def types(self) -> tuple[str, ...]:
        return self.layer_types or _pattern(self.num_layers)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        if fields.require("model_type", "gemma3_text", "gemma3") == "gemma3_text":
            return cls._from_text(fields)
        text = cls._from_text(fields.nested("text_config"))
        tied = fields.take("tie_word_embeddings", text.tied)
        return dataclasses.replace(text, vision=Vision.from_hf(fields), tied=tied)

    @classmethod
    def _from_text(cls, fields: HFConfig) -> "Config":
        fields.require("model_type", "gemma3_text")
        fields.require("hidden_activation", GELU)
        fields.require("hidden_act", GELU)
        for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
            fields.require(name, None, False)
        read = fields.read(TEXT)
        types = fields.layer_types(read["num_layers"], LOCAL, GLOBAL)
        period = fields.take("sliding_window_pattern", 6)
        fields.ignore("_sliding_window_pattern")  # transformers 5 writes it beside layer_types, and never reads it
        types = types or _pattern(read["num_layers"], period)
        local = {"layer_type": LOCAL, "theta_field": "rope_local_base_freq", "scaling_field": None}
        length = {"head_dim": read["head_dim"], "default_length": CONTEXT}
        return cls(
            **read,
            rope=fields.rope(layer_type=GLOBAL, default_theta=1e6, **length),
            local_rope=fields.rope(**local, **length),
            layer_types=None if types == _pattern(read["num_layers"]) else types,
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's class does not have."""
        if self.vision is None:
            return {"architectures": ["Gemma3ForCausalLM"], **self._text_to_hf()}
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": self._text_to_hf(),
            "tie_word_embeddings": self.tied,
            **self.vision.to_hf(),
        }

    def _text_to_hf(self) -> dict[str, Any]:
        far = rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True)
        near = rope_to_hf(self.local_rope, head_dim=self.head_dim, whole_heads=True)
        return {
            "model_type": "gemma3_text",
            **written(self, TEXT),
            "hidden_activation": GELU,
            "layer_types": list(self.types),
            **far,
            "rope_local_base_freq": near["rope_theta"],
            "rope_parameters": {GLOBAL: far["rope_parameters"], LOCAL: near["rope_parameters"]},
        }


class Block(nnx.Module):
    """Sandwich norms: each branch is normed before and after."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope, *, rngs: nnx.Rngs):
        norm = lambda dim: nn.RMSNorm(dim, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm(cfg.dim)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=rope,
            q_norm=norm(cfg.head_dim),
            k_norm=norm(cfg.head_dim),
            scale=cfg.query_scalar**-0.5,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.attn_post_norm = norm(cfg.dim)
        self.mlp_norm = norm(cfg.dim)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = norm(cfg.dim)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Gemma3(nn.VisionDecoder):
    """A decoder, `docs/decisions/0001`, which sees images if `cfg.vision` is given."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        # The window also limits what the tokens of one image see of each other.
        both_ways = ops.Causal() | ops.BidirectionalBlocks()
        kinds = {LOCAL: (both_ways & ops.SlidingWindow(cfg.window), cfg.local_rope), GLOBAL: (both_ways, cfg.rope)}
        self.masks, self.ropes = zip(*kinds.values(), strict=True)
        make = lambda i, rngs: Block(cfg, *kinds[cfg.types[i]], rngs=rngs)
        # Scaled by sqrt(dim), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(cfg.types), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else cfg.vision.tower(rngs)
        self.projector = None if cfg.vision is None else cfg.vision.projector(cfg.dim, rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights; those of models that see have a prefix, which transformers puts
    elsewhere.
    """
    layer = [
        Weight("input_layernorm.weight", "attn_norm.scale"),
        *names.ATTENTION,
        Weight("post_attention_layernorm.weight", "attn_post_norm.scale"),
        Weight("pre_feedforward_layernorm.weight", "mlp_norm.scale"),
        *names.MLP,
        Weight("post_feedforward_layernorm.weight", "mlp_post_norm.scale"),
    ]
    if cfg.vision is None:
        return names.decoder_table(layer)
    renamed = [
        Renamed("lm_head.", "language_model.lm_head."),
        Renamed("model.language_model.", "language_model.model."),
    ]
    return [*names.decoder_table(layer, prefix="language_model."), *sight.table(), *renamed]


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
    "gemma3-270m": dataclasses.replace(_1B, num_layers=18, dim=640, mlp_dim=2048),
    "gemma3-1b": _1B,
    "gemma3-4b": _4B,
    "gemma3-12b": dataclasses.replace(_4B, num_layers=48, dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma3-27b": dataclasses.replace(
        _4B, num_layers=62, dim=5376, mlp_dim=21_504, num_heads=32, num_kv_heads=16, head_dim=128, query_scalar=168,
        **_ropes(128, CONTEXT, factor=8.0),
    ),
}
# fmt: on

FAMILY = Family(
    name="gemma3", model_types=("gemma3_text", "gemma3"), model=Gemma3, config=Config, table=_table, presets=PRESETS
)
