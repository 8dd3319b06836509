"""Dream (Ye et al. 2025, arXiv:2508.15487): Qwen2.5 whose tokens attend in both directions, a masked diffusion model.

The token before a masked one predicts it, as in the model that it was trained from: `training.MaskedDiffusion` and
`inference.denoise` take `shifted=True`.
"""

from dataclasses import dataclass

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Dream; `PRESETS` has the published one."""

    mlp_dim: int
    mask_token: int  # id of masks


class Block(PreNorm):
    """Qwen2's layer, with attention in both directions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=ops.Full(), rope=cfg.rope, bias=True, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class Dream(TextDecoder):
    """Dream: every token attends to every other one, so there is no cache."""

    has_cache = False

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [*DECODER, fields.rope(), Field("mask_token", "mask_token_id")],
    model_types={"Dream": "DreamModel"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"use_mrope": False, "use_sliding_window": False, "sliding_window": None},
    ignored=["max_window_layers"],  # of windows, which are off
    absent={"head_dim": fields.equal_heads},
)


# fmt: off
PRESETS = {
    "dream-7b": Config(
        vocab=152_064, num_layers=28, dim=3584, mlp_dim=18_944, num_heads=28, num_kv_heads=4, head_dim=128,
        rope=Rope(128, 1_000_000.0, max_length=131_072), mask_token=151_666,
    ),
}
# fmt: on

FAMILY = Family("dream", Dream, FIELDS, llama_table, PRESETS)
