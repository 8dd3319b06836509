"""SmolLM3 (Hugging Face 2025): Llama, but every fourth layer has no rotary positions (NoPE, as in RNoPE by Yang et al.
2025, arXiv:2501.18795).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, WindowSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, fields


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a SmolLM3; `PRESETS` has the published ones."""

    mlp_dim: int
    # Whether each layer has rotary positions; None: all but every fourth.
    rotated: tuple[bool, ...] | None = None
    tied: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.rotated is not None and len(self.rotated) != self.num_layers:
            raise ValueError(
                f"rotated (no_rope_layers) must have {self.num_layers} entries, one for each layer, got {len(self.rotated)}"
            )

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotation of each layer."""
        return tuple(self.rope if rotated else None for rotated in self.rotated or _rotated(self.num_layers))


class Block(PreNorm):
    """Llama's layer; without a rope, its attention gets the order of tokens only from the causal mask."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)


def _rotated(num_layers: int, interval: int = 4) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(num_layers))


class SmolLM3(TextDecoder):
    """SmolLM3: three layers with rotary positions, one without, which generalises better to longer texts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(
            cfg,
            lambda kind, rngs: Block(cfg, *kind, rngs=rngs),
            tuple(zip(cfg.masks, cfg.ropes, strict=True)),
            rngs=rngs,
        )


def _read_rotated(hf: HFConfig, c: Any) -> tuple[bool, ...] | None:
    every = _rotated(c.num_layers, hf.take("no_rope_layer_interval", 4))
    rotated = tuple(map(bool, hf.take("no_rope_layers", every, kind=list)))[: c.num_layers]
    return None if rotated == _rotated(c.num_layers) else rotated


def _write_rotated(value: tuple[bool, ...] | None, cfg: Any) -> dict[str, Any]:
    rotated = [int(rope is not None) for rope in cfg.ropes]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4}  # sic: 1 is rotated


def _by_rotation(hf: HFConfig, c: Any) -> tuple[str, ...]:
    """Returns the layer types that config.json implies: with a window, the layers without rotary positions have it."""
    window = fields.switched_window(hf, absent=None)
    rotated = c.rotated or _rotated(c.num_layers)
    return tuple(FULL if window is None or rotary else SLIDING for rotary in rotated)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(default_theta=2_000_000.0),
        Computed("rotated", _read_rotated, _write_rotated),
        fields.layer_types(FULL, SLIDING, usual=lambda c: (FULL,) * c.num_layers, absent=_by_rotation),
        fields.window_of_sliding(absent=None),
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
    ],
    model_types={"smollm3": "SmolLM3ForCausalLM"},
    fixed={"hidden_act": "silu"},
    ignored=("max_window_layers",),  # in the released config, copied from Qwen2; unused
    absent={"head_dim": fields.equal_heads},
)


# fmt: off
PRESETS = {
    "smollm3-3b": Config(
        vocab=128_256, num_layers=36, dim=2048, mlp_dim=11_008, num_heads=16, num_kv_heads=4, head_dim=128,
        rope=Rope(128, 5_000_000.0, max_length=65_536),
    )
}
# fmt: on

FAMILY = Family("smollm3", SmolLM3, FIELDS, llama_table, PRESETS)
