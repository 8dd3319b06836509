"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): alternating local and global layers, norms before and after each
branch, soft-caps.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import GemmaDecoder, PreNorm, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, WindowSizes, every
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a Gemma 2; `PRESETS` has the published ones. Local and global layers alternate, local ones first."""

    period: ClassVar[int] = 2

    mlp_dim: int
    window: int = 4096  # of the local layers
    query_scalar: int = 256  # scores are divided by its square root
    attention_softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    tied: bool = True
    attention_bias: bool = False


class Block(PreNorm):
    """Sandwich norms: each branch is normalized before and after, so that its output has a learned scale."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        # Scores become 50 * tanh(q . k / sqrt(query_scalar) / 50): none is larger than 50.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.attn = attention(
            cfg,
            mask=mask,
            rope=cfg.rope,
            bias=bias,
            out_bias=bias,
            scale=cfg.query_scalar**-0.5,
            softcap=cfg.attention_softcap,
            rngs=rngs,
        )
        self.attn_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)


class Gemma2(GemmaDecoder):
    """Gemma 2: every other layer only attends to the last 4096 tokens; scores and logits are capped by a tanh."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)
        self.softcap = cfg.final_softcap


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        fields.WINDOW,
        fields.layer_types(SLIDING, FULL, usual=lambda c: every(2, c.num_layers, SLIDING, FULL)),
        Field("query_scalar", "query_pre_attn_scalar"),
        Field("attention_softcap", "attn_logit_softcapping"),
        Field("final_softcap", "final_logit_softcapping"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gemma2": "Gemma2ForCausalLM"},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    # hidden_act is never read by transformers; the releases have both.
    fixed_if_present={"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    absent={"vocab": 256_000, "head_dim": 256},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.SANDWICH_NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_9B = Config(
    vocab=256_000, num_layers=42, dim=3584, mlp_dim=14_336, num_heads=16, num_kv_heads=8, head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)
PRESETS = {
    "gemma2-2b": replace(_9B, num_layers=26, dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2-9b": _9B,
    "gemma2-27b": replace(
        _9B, num_layers=46, dim=4608, mlp_dim=36_864, num_heads=32, num_kv_heads=16, head_dim=128,
        rope=Rope(128, 10_000.0, max_length=8192), query_scalar=144,
    ),
}
# fmt: on

FAMILY = Family("gemma2", Gemma2, FIELDS, _table, PRESETS)
