"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after each branch and of the heads; in the larger model three
layers of four slide, and only these have rotary positions.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, RotatedWindowSizes, every
from maxlib.ops import Llama3Scaling, Rope
from maxlib.weights import Computed, Family, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(RotatedWindowSizes):
    """Sizes of an EXAONE 4; `PRESETS` has the published ones."""

    mlp_dim: int
    norm_eps: float = 1e-5


class Block(PreNorm):
    """`x + norm(branch(x))` twice."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        self.attn = attention(cfg, mask=mask, rope=rope, qk_norm=True, rngs=rngs)
        self.attn_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)


class Exaone4(TextDecoder):
    """EXAONE 4: windows with rotation, and full layers without positions for long texts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)


def _read_layer_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    pattern = hf.take("sliding_window_pattern", 4, kind=object)
    if isinstance(pattern, str):  # "LLLG": local layers, then a global one
        hf.require("sliding_window_pattern", "L" * (len(pattern) - 1) + "G")
        pattern = len(pattern)
    period = 1 if c.window is None else max(pattern, 1)
    types = hf.layer_types(c.num_layers, FULL, SLIDING) or every(period, c.num_layers, SLIDING, FULL)
    return None if types == every(1 if c.window is None else 4, c.num_layers, SLIDING, FULL) else types


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(default_length=2048),
        fields.WINDOW,
        Computed("layer_types", _read_layer_types, lambda value, cfg: {"layer_types": [*cfg.types]}),
    ],
    model_types={"exaone4": "Exaone4ForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": 32, "head_dim": fields.equal_heads, "window": 4096},
)


def _table(cfg: Config) -> Table:
    norms = names.norms(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    return names.decoder_table([*names.ATTENTION, *names.MLP, *norms])


# fmt: off
_SCALING = Llama3Scaling(16.0, 1.0, 4.0, 8192)
_1B = Config(
    vocab=102_400, num_layers=30, dim=2048, mlp_dim=4096, num_heads=32, num_kv_heads=8, head_dim=64,
    rope=Rope(64, 1_000_000.0, _SCALING, max_length=65_536), tied=True,
)
PRESETS = {
    "exaone-4.0-1.2b": _1B,
    "exaone-4.0-32b": replace(
        _1B, num_layers=64, dim=5120, mlp_dim=27_392, num_heads=40, head_dim=128, window=4096, tied=False,
        rope=Rope(128, 1_000_000.0, _SCALING, max_length=131_072),
    ),
}
# fmt: on

FAMILY = Family("exaone4", Exaone4, FIELDS, _table, PRESETS)
