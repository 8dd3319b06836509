"""Muse Glimmer (Meta 2026): windows with rotary positions, full layers without, queries and keys of unit length, gated
attention; it reads images of any size.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _muse_glimmer_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, AttentionSizes, causal
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Renamed, Table, Weight, fields, names

Vision = vision.Vision


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Muse Glimmer; `PRESETS` has the published ones."""

    mlp_dim: int
    rotated: tuple[bool, ...] | None = None  # each layer; None: all but every fourth, counted from the last
    window: int = 2048  # of the sliding layers
    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING; None: every fourth, counted from the last, is FULL
    query_scale: float = 3.87  # beside head_dim ** -0.5
    logit_scale: float
    final_softcap: float = 20.0
    norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8  # of the norms behind attention and MLP
    vision: Vision | None = None  # None: only text

    def __post_init__(self):
        fields.check_layer_types(self)


class Block(PreNorm):
    """Sandwich norms, as in Gemma 2, around gated attention and an MLP."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        D, unit = cfg.dim, nn.norm.UnitRMSNorm(cfg.norm_eps)
        # Unit vectors have scores of at most sqrt(H), which the factor sharpens.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.attn = attention(
            cfg,
            mask=mask,
            rope=rope,
            q_norm=unit,
            k_norm=unit,
            scale=cfg.query_scale * cfg.head_dim**-0.5,
            out_gate_act=jax.nn.sigmoid,
            rngs=rngs,
        )
        self.attn_post_norm = nn.RMSNorm(D, eps=cfg.post_norm_eps, plus_one=True)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(D, eps=cfg.post_norm_eps, plus_one=True)


def _masks_and_ropes(cfg: Config) -> tuple[tuple[ops.Mask, Rope | None], ...]:
    """Returns the mask and the rotation of each layer."""
    masks = {FULL: causal(None), SLIDING: causal(cfg.window)}
    types, rotated = cfg.layer_types or _usual_types(cfg), cfg.rotated or _usually_rotated(cfg)
    return tuple((masks[kind], cfg.rope if turned else None) for kind, turned in zip(types, rotated, strict=True))


def _usual_types(c: Any) -> tuple[str, ...]:
    """Returns the types of layers: every fourth, counted from the last, is full."""
    return tuple(SLIDING if (c.num_layers - 1 - i) % 4 else FULL for i in range(c.num_layers))


def _usually_rotated(c: Any) -> tuple[bool, ...]:
    return tuple(kind == SLIDING for kind in _usual_types(c))


class MuseGlimmer(PatchReader, TextDecoder):
    """Muse Glimmer: three layers have a window of 2048 tokens and RoPE, the fourth full attention without positions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        kinds = _masks_and_ropes(cfg)
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), kinds, rngs=rngs)
        self.softcap, sees = cfg.final_softcap, cfg.vision
        self.tower = None if sees is None else vision.ImageEncoder(sees, cfg.dim, norm_eps=cfg.norm_eps, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the vectors of `tokens`, each of mean square one."""
        return nn.norm.UnitRMSNorm(self.cfg.norm_eps)(self.embed(tokens, dtype=dtype))

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head, scaled: the loss takes hidden states and never makes logits."""
        return self.cfg.logit_scale * super().leave(x, ctx)


def _read_rotated(hf: HFConfig, c: Any) -> tuple[bool, ...] | None:
    """Reads `layer_rope_theta`, the base of each layer's rope, which is 0 in layers without positions."""
    usual = tuple(c.rope.theta * rotated for rotated in _usually_rotated(c))
    thetas = tuple(hf.take("layer_rope_theta", usual, kind=list))
    if len(thetas) != c.num_layers or not set(thetas) <= {0, c.rope.theta}:
        raise ValueError(
            f"{hf.where('layer_rope_theta')} must give 0 or {c.rope.theta} (rope_theta) for each of the "
            f"{c.num_layers} layers, got {thetas}: no other is computed."
        )
    rotated = tuple(map(bool, thetas))
    return None if rotated == _usually_rotated(c) else rotated


def _write_rotated(value: tuple[bool, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"layer_rope_theta": [cfg.rope.theta if rotated else 0 for rotated in value or _usually_rotated(cfg)]}


TEXT = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        Computed("rotated", _read_rotated, _write_rotated),
        fields.WINDOW,
        fields.layer_types(FULL, SLIDING, usual=_usual_types),
        Field("query_scale", "qk_scale_factor"),
        Field("logit_scale", "output_multiplier"),
        Field("final_softcap", "final_logit_softcapping"),
        Field("post_norm_eps"),
    ],
    model_types={"muse_glimmer_text": "MuseGlimmerForConditionalGeneration"},
    fixed={"hidden_activation": "silu", "attention_bias": False},
    fixed_if_present={"hidden_act": "silu"},
    absent={"head_dim": 128, "logit_scale": 0.19611613513818404},
)


FIELDS = fields.Multimodal(
    TEXT, {"vision": vision.FIELDS}, model_types={"muse_glimmer": "MuseGlimmerForConditionalGeneration"}
)


def _table(cfg: Config) -> Table:
    gate = Weight("self_attn.gate_proj.weight", "attn.gate.w", "(N H) D -> N H D")
    layer = [*names.SANDWICH_NORMS, *names.ATTENTION, gate, *names.MLP]
    if cfg.vision is not None:
        return [*names.decoder_table(layer, model="model.language_model"), *vision.table(cfg.vision)]
    # The text part of a model that reads images.
    renamed = [Renamed("model.language_model.", "language_model.model."), Renamed("language_model.", "")]
    images = [Ignore(f"model.vision_{part}.*") for part in ("tower", "adapter", "projection")]
    return [*names.decoder_table(layer), *renamed, *images]


# fmt: off
PRESETS = {
    "muse-glimmer-30b": Config(
        vocab=202_048, num_layers=52, dim=6656, mlp_dim=19_968, num_heads=32, num_kv_heads=2, head_dim=128,
        rope=Rope(128, 500_000.0, max_length=131_072), logit_scale=0.19611613513818404, vision=Vision(),
    )
}
# fmt: on

FAMILY = Family("muse_glimmer", MuseGlimmer, FIELDS, _table, PRESETS)
