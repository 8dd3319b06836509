"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 in most layers, rotary attention in a few, an MLP in each."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _sizes as sizes
from maxlib.models._layers import PreNorm, TextDecoder, attention, mamba2
from maxlib.models._sizes import DECODER, AttentionSizes, MambaSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, MambaSizes):
    """Sizes of a Bamba; `PRESETS` has the published ones."""

    mlp_dim: int
    attention_layers: tuple[int, ...] = ()  # the layers with attention; all others have Mamba-2
    mamba_expand: int = 2  # width of all heads of Mamba together, in widths of the model
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer has attention."""
        return tuple(i in self.attention_layers for i in range(self.num_layers))


class Block(PreNorm):
    """Mixes tokens by attention or Mamba-2, then passes each through an MLP."""

    def __init__(self, cfg: Config, *, attends: bool, rngs: nnx.Rngs):
        D, bias, width = cfg.dim, cfg.attention_bias, cfg.mamba_expand * cfg.dim // cfg.mamba_heads
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs) if attends else None
        self.mamba = None if attends else mamba2(D, cfg, head_dim=width, norm_eps=cfg.norm_eps, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)


class Bamba(TextDecoder):
    """Bamba: about one layer of ten has keys and values in its cache."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda attends, rngs: Block(cfg, attends=attends, rngs=rngs), cfg.attends, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    """Reads the rope of one half of each head, whatever `partial_rotary_factor` says."""
    hf.require("partial_rotary_factor", 0.5)
    return fields.read_rope(hf, head_dim=c.head_dim, partial=True, default_fraction=0.5)


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    if 2 * rope.dim != cfg.head_dim:
        raise ValueError(f"Bamba's rope must rotate one half of a head, {cfg.head_dim // 2} dimensions, got {rope.dim}")
    return fields.write_rope(rope, head_dim=cfg.head_dim)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        Computed("rope", _read_rope, _write_rope),
        Field("attention_layers", "attn_layer_indices"),
        Field("mamba_expand"),
        sizes.mamba_heads(lambda c: c.mamba_expand * c.dim),
        *sizes.MAMBA,
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
    ],
    model_types={"bamba": "BambaForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": 8, "head_dim": fields.equal_heads, "mamba_state": 256},
    null={"attention_layers": ()},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        *names.ATTENTION,
        *names.mlp("feed_forward.{}_proj", "mlp"),
    ]
    inner, groups = cfg.mamba_expand * cfg.dim, cfg.mamba_groups * cfg.mamba_state
    layer += names.mamba2("mamba", "mamba", heads=cfg.mamba_heads, inner=inner, groups=groups)
    return names.decoder_table(layer, norm="final_layernorm")


# fmt: off
PRESETS = {
    "bamba-9b": Config(
        vocab=128_256, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
        rope=Rope(64, 10_000.0, max_length=262_144), attention_layers=(9, 18, 27), mamba_heads=128, mamba_state=128,
    )
}
# fmt: on

FAMILY = Family("bamba", Bamba, FIELDS, _table, PRESETS)
