"""SDAR (Cheng et al. 2025, arXiv:2510.06303): Qwen3 whose tokens attend to their own block and to all earlier ones, for
block diffusion.

It is trained with `training.MaskedDiffusion` and generates with `inference.denoise`, which caches finished blocks.
"""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an SDAR; `PRESETS` has the published ones."""

    mlp_dim: int
    block: int = 4  # tokens of a block
    mask_token: int = 151_669  # id of masks
    attention_bias: bool = False


class Block(PreNorm):
    """Qwen3's layer under a block-causal mask."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        mask, bias = ops.BlockCausal(cfg.block), cfg.attention_bias
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class SDAR(TextDecoder):
    """SDAR: a Qwen3 that predicts blocks of tokens instead of one after the other."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        Field("block", "block_size"),
        Field("mask_token", "mask_token_id"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"sdar": "SDARForCausalLM"},
    fixed={"hidden_act": "silu"},
    # of windows, which are off, and of training
    ignored=("max_window_layers", "debug", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
    absent={"head_dim": 128},
)

# fmt: off
_8B = Config(
    vocab=151_936, num_layers=36, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
)
# fmt: on
PRESETS = {
    "sdar-1.7b": replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16),
    "sdar-4b": replace(_8B, dim=2560, mlp_dim=9728),
    "sdar-8b": _8B,
}

FAMILY = Family("sdar", SDAR, FIELDS, llama_table, PRESETS)
