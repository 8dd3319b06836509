"""CWM (Meta FAIR 2025, arXiv:2510.02387): Llama in which three layers of four have a window."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, WindowSizes, llama_table
from maxlib.ops import Llama3Scaling, Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a CWM; `PRESETS` has the published ones."""

    mlp_dim: int
    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING for each layer; None: every fourth from the first on
    window: int | None = 8192
    norm_eps: float = 1e-5

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or SLIDING for each layer."""
        return self.layer_types or _usual_types(self)


def _usual_types(c: Any) -> tuple[str, ...]:
    return tuple(SLIDING if i % 4 else FULL for i in range(c.num_layers))


class Block(PreNorm):
    """Llama's layer, under a mask that may have a window."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class CWM(TextDecoder):
    """CWM: a code model trained on what programs do when they run."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)


_SCALING = Llama3Scaling(16.0, 1.0, 4.0, 8192)
FIELDS = Fields(
    Config,
    [
        *DECODER,
        # Without any of its fields the rope is the released one, as in transformers.
        fields.rope(default_theta=1_000_000.0, default_length=131_072, default_scaling=_SCALING),
        fields.layer_types(FULL, SLIDING, usual=_usual_types),
        fields.WINDOW,
    ],
    model_types={"cwm": "CwmForCausalLM"},
    fixed={"hidden_act": "silu", "mlp_bias": False},
    absent={"num_kv_heads": 8, "head_dim": 128},
)

# fmt: off
PRESETS = {
    "cwm-32b": Config(
        vocab=128_256, num_layers=64, dim=6144, mlp_dim=21_504, num_heads=48, num_kv_heads=8, head_dim=128,
        rope=Rope(128, 1_000_000.0, _SCALING, max_length=131_072),
    )
}
# fmt: on

FAMILY = Family("cwm", CWM, FIELDS, llama_table, PRESETS)
