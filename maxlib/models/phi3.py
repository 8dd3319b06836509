"""Phi-3, Phi-3.5 and Phi-4 (Microsoft 2024, arXiv:2404.14219, 2412.08905): Llama's block with fused projections on
disk, windows, LongRoPE.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, causal
from maxlib.ops import LongRopeScaling, Rope
from maxlib.weights import Computed, Family, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Phi-3; `PRESETS` has the published ones."""

    mlp_dim: int
    rope: Rope  # Phi-4-mini turns three quarters of a head
    window: int | None = None  # None: every token attends to all earlier ones
    norm_eps: float = 1e-5

    def __post_init__(self):
        if not isinstance(self.rope.scaling, LongRopeScaling | None) or self.rope.interleaved:
            raise ValueError(
                f"Phi-3's rope must have the scaling LongRopeScaling (config.json: rope_type longrope) or none, and not be "
                f"interleaved, got {self.rope}"
            )


class Block(PreNorm):
    """Llama's layer, under a mask that may have a window."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=causal(cfg.window), rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Phi3(TextDecoder):
    """Phi-3: Llama for long texts, with a searched frequency divisor for each pair of rotary dimensions.

    LongRoPE (Ding et al. 2024, arXiv:2402.13753) has two lists of factors: one up to the original training length, one
    for longer texts.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        if isinstance(cfg.rope.scaling, LongRopeScaling):
            self.recompute_cache_at = cfg.rope.scaling.original_length + 1
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


_ROPE = fields.rope(partial=True, default_length=4096)  # Phi-4-mini turns three quarters of a head


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    rope = _ROPE.read(hf, c)
    # LongRoPE switches its factors at the length that the config's top level gives, as in all releases.
    if rope.scaling is not None and hf.take("original_max_position_embeddings", None, kind=int) is None:
        raise ValueError(
            "config.json: original_max_position_embeddings must be given beside max_position_embeddings, but it is "
            "missing: transformers takes 4096 then, whatever the scaling says. Add the length that the model was first "
            "trained for."
        )
    return rope


FIELDS = Fields(
    Config,
    [
        *DECODER,
        Computed("rope", _read_rope, _ROPE.write),
        fields.WINDOW,
    ],
    model_types={"phi3": "Phi3ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"full_attn_mod": 1, "interpolate_factor": 1},  # of Phi-4-mini; transformers has neither
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    # Queries, keys and values are rows of one tensor, so are gate and up.
    rows = {"q": 0, "k": cfg.num_heads, "v": cfg.num_heads + cfg.num_kv_heads}
    qkv = [
        Weight("self_attn.qkv_proj.weight", f"attn.{part}.w", "(R H) D -> R H D", at={"R": first})
        for part, first in rows.items()
    ]
    layer = [
        *names.NORMS,
        *qkv,
        Weight("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> D N H"),
        *names.gate_up("mlp.gate_up_proj", "mlp"),
        Weight("mlp.down_proj.weight", "mlp.down.w"),
    ]
    return names.decoder_table(layer)


def _float32(text: str) -> tuple[float, ...]:
    return tuple(float(np.float32(number)) for number in text.split())


def _longrope(short: tuple[float, ...], long: tuple[float, ...]) -> Rope:
    return Rope(96, 10_000.0, LongRopeScaling(short, long, 4096, factor=32.0), max_length=131_072)


# LongRoPE's factors by pair of dimensions, of Phi-3.5 and of Phi-4-mini.
# fmt: off
_LONG_3_5 = _float32(
    """
    1.08 1.11 1.14 1.34 1.5899999 1.6 1.62 2.6200001 3.23 3.23 4.79 7.4 7.7000003 9.09 12.2 17.67 24.460001
    28.570002 30.420002 30.840002 32.590004 32.930004 42.320004 44.960003 50.340004 50.450005 57.550003 57.930004
    58.210003 60.140003 62.610004 62.620003 62.710003 63.140003 63.140003 63.770004 63.930004 63.960003 63.97 64.03
    64.07 64.08 64.12 64.41 64.48 64.51 64.53 64.84
    """
)
_SHORT_3_5 = _float32(
    """
    1.0 1.02 1.03 1.03 1.05 1.05 1.05 1.05 1.05 1.0699999 1.0999999 1.1099999 1.1599998 1.1599998 1.1699998
    1.2899998 1.3399998 1.6799998 1.7899998 1.8199998 1.8499998 1.8799998 1.9099997 1.9399997 1.9899997 2.0199997
    2.0199997 2.0199997 2.0199997 2.0199997 2.0199997 2.0299997 2.0299997 2.0299997 2.0299997 2.0299997 2.0299997
    2.0299997 2.0299997 2.0299997 2.0799997 2.0899997 2.1899996 2.2199996 2.5899994 2.7299995 2.7499995 2.8399994
    """
)
_LONG_4 = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
_MINI = Config(
    vocab=32_064, num_layers=32, dim=3072, mlp_dim=8192, num_heads=32, num_kv_heads=32, head_dim=96,
    rope=Rope(96, 10_000.0, max_length=4096), window=2047,
)
_MEDIUM = replace(
    _MINI, num_layers=40, dim=5120, mlp_dim=17_920, num_heads=40, num_kv_heads=10, head_dim=128,
    rope=Rope(128, max_length=4096),
)
_MINI_3_5 = replace(_MINI, rope=_longrope(_SHORT_3_5, _LONG_3_5), window=262_144)
PRESETS = {
    "phi-3-mini-4k": _MINI,
    "phi-3-medium-4k": _MEDIUM,
    "phi-3.5-mini": _MINI_3_5,
    "phi-4-mini": replace(
        _MINI_3_5, vocab=200_064, num_heads=24, num_kv_heads=8, head_dim=128, rope=_longrope((1.0,) * 48, _LONG_4),
        tied=True,
    ),
    "phi-4": replace(_MEDIUM, vocab=100_352, rope=Rope(128, 250_000.0, max_length=16_384), window=None),
}
# fmt: on

FAMILY = Family("phi3", Phi3, FIELDS, _table, PRESETS)
