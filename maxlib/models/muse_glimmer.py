"""Muse Glimmer (Meta 2026), its text: windows with rotary positions, full layers without, queries and keys of unit
length, gated attention.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import (
    Family,
    HFConfig,
    Ignore,
    ModelConfig,
    Renamed,
    Table,
    Weight,
    hf,
    hf_fields,
    hf_layer_types,
    hf_rope,
    names,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def _usual(c: Any) -> tuple[str, ...]:
    """Returns the types of layers: every fourth, counted from the last, is full."""
    return tuple(SLIDING if (c.num_layers - 1 - i) % 4 else FULL for i in range(c.num_layers))


def _usually_rotated(c: Any) -> tuple[bool, ...]:
    return tuple(kind == SLIDING for kind in _usual(c))


def _read_rotated(fields: HFConfig, c: Any) -> tuple[bool, ...] | None:
    """Reads `layer_rope_theta`, the base of each layer's rope, which is 0 in layers without positions."""
    usual = tuple(c.rope.theta * rotated for rotated in _usually_rotated(c))
    thetas = tuple(fields.take("layer_rope_theta", usual, kind=list))
    if len(thetas) != c.num_layers or not set(thetas) <= {0, c.rope.theta}:
        raise ValueError(
            f"{fields.where('layer_rope_theta')} must give 0 or {c.rope.theta} (rope_theta) for each of the "
            f"{c.num_layers} layers, got {thetas}: no other is computed."
        )
    rotated = tuple(map(bool, thetas))
    return None if rotated == _usually_rotated(c) else rotated


def _write_rotated(value: tuple[bool, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"layer_rope_theta": [cfg.rope.theta if rotated else 0 for rotated in value or _usually_rotated(cfg)]}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Muse Glimmer's text; `PRESETS` has the published ones."""

    model_types = ("muse_glimmer_text",)
    architecture = "MuseGlimmerForConditionalGeneration"
    fixed = {"hidden_activation": "silu", "attention_bias": False}
    fixed_if_present = {"hidden_act": "silu", "attn_logit_softcapping": None, "mlp_bias": False}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=128)
    rope: Rope = hf_rope()
    # Whether each layer is rotated; None: all but every fourth, counted from the last.
    rotated: tuple[bool, ...] | None = hf_fields(_read_rotated, _write_rotated, default=None)
    window: int = hf("sliding_window", 2048)  # of the sliding layers
    # FULL or SLIDING for each layer; None: every fourth, counted from the last, is FULL.
    layer_types: tuple[str, ...] | None = hf_layer_types(FULL, SLIDING, usual=_usual)
    query_scale: float = hf("qk_scale_factor", 3.87)  # beside head_dim ** -0.5
    logit_scale: float = hf("output_multiplier", absent=0.19611613513818404)
    final_softcap: float = hf("final_logit_softcapping", 20.0)
    norm_eps: float = hf("rms_norm_eps", 1e-5)
    post_norm_eps: float = hf("post_norm_eps", 1e-8)  # of the norms behind attention and MLP
    tied: bool = hf("tie_word_embeddings", False)
    tower: str | None = None  # kind of the image encoder in the files; only None is computed

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", *cls.model_types, "muse_glimmer") != "muse_glimmer":
            return super().from_hf(fields)
        text, encoder = super().from_hf(fields.nested("text_config")), fields.take("vision_config", kind=dict)
        fields.ignore("image_token_id", "video_token_id", "out_hidden_size", "projector_hidden_size")
        fields.ignore("projector_hidden_act")
        tied = fields.take("tie_word_embeddings", text.tied)
        return replace(text, tower=encoder.get("model_type", "muse_glimmer_vision"), tied=tied)

    @property
    def kinds(self) -> tuple[tuple[ops.Mask, Rope | None], ...]:
        """The mask and the rotation of each layer."""
        masks = {FULL: ops.Causal(), SLIDING: ops.Causal() & ops.SlidingWindow(self.window)}
        types, rotated = self.layer_types or _usual(self), self.rotated or _usually_rotated(self)
        return tuple((masks[kind], self.rope if turned else None) for kind, turned in zip(types, rotated, strict=True))


class Block(nn.Layer):
    """Sandwich norms, as in Gemma 2, around gated attention and an MLP."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        D, unit = cfg.dim, nn.norm.UnitRMSNorm(cfg.norm_eps)
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        # Unit vectors have scores of at most sqrt(H), which the factor sharpens.
        scores: Any = dict(q_norm=unit, k_norm=unit, scale=cfg.query_scale * cfg.head_dim**-0.5)
        norm = lambda eps: nn.RMSNorm(D, eps=eps, plus_one=True)
        self.attn_norm = norm(cfg.norm_eps)
        self.attn = nn.Attention(D, **heads, mask=mask, rope=rope, **scores, out_gate_act=jax.nn.sigmoid, rngs=rngs)
        self.attn_post_norm = norm(cfg.post_norm_eps)
        self.mlp_norm = norm(cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.mlp_post_norm = norm(cfg.post_norm_eps)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class MuseGlimmer(nn.Decoder):
    """Muse Glimmer: three layers have a window of 2048 tokens and RoPE, the fourth full attention without positions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        if cfg.tower is not None:
            raise ValueError(
                f"the image encoder of this model (vision_config, {cfg.tower}) is not computed. Read its text alone: "
                "from_pretrained(..., tower=None)"
            )
        self.cfg, self.softcap = cfg, cfg.final_softcap
        self.masks, self.ropes = tuple(dict.fromkeys(mask for mask, _ in cfg.kinds)), (cfg.rope,)  # each mask once
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the vectors of `tokens`, each of mean square one."""
        return nn.norm.UnitRMSNorm(self.cfg.norm_eps)(self.embed(tokens, dtype=dtype))

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head, scaled: the loss takes hidden states and never makes logits."""
        return self.cfg.logit_scale * super().leave(x, ctx)


def _table(cfg: Config) -> Table:
    gate = Weight("self_attn.gate_proj.weight", "attn.gate.w", "(N H) D -> N H D")
    # The text part of a model that reads images.
    renamed = [Renamed("model.language_model.", "language_model.model."), Renamed("language_model.", "")]
    images = [Ignore(f"model.vision_{part}.*") for part in ("tower", "adapter", "projection")]
    return [*names.decoder_table([*names.SANDWICH_NORMS, *names.ATTENTION, gate, *names.MLP]), *renamed, *images]


# fmt: off
PRESETS = {
    "muse-glimmer-30b": Config(
        vocab=202_048, num_layers=52, dim=6656, mlp_dim=19_968, num_heads=32, num_kv_heads=2, head_dim=128,
        rope=Rope(128, 500_000.0, max_length=131_072), logit_scale=0.19611613513818404,
    )
}
# fmt: on

FAMILY = Family(
    name="muse_glimmer",
    model=MuseGlimmer,
    config=Config,
    table=_table,
    presets=PRESETS,
    model_types=(*Config.model_types, "muse_glimmer"),
)
