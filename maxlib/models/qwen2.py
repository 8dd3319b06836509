"""Qwen2 and Qwen2.5 (Qwen team 2024, arXiv:2407.10671, 2412.15115): Llama's block with biases on queries, keys and
values.
"""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, WindowSizes, llama_table
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes):
    """Sizes of a Qwen2; `PRESETS` has the published ones."""

    mlp_dim: int


class Block(PreNorm):
    """Llama's layer with biases on queries, keys and values, and none on the output."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, bias=True, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Qwen2(TextDecoder):
    """Qwen2: Llama with biases on queries, keys and values; in long contexts upper layers may use sliding windows."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        # The stack finds how the masks repeat, so that as many layers as possible are scanned.
        super().__init__(cfg, lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(),
        *fields.upper_layers_slide(FULL, absent=28, window=4096),
    ],
    model_types={"qwen2": "Qwen2ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"use_mrope": False},
    absent={"head_dim": fields.equal_heads},
)


# fmt: off
_LONG, _SHORT = (Rope(128, 1_000_000.0, max_length=length) for length in (131_072, 32_768))
_7B = Config(
    vocab=152_064, num_layers=28, dim=3584, mlp_dim=18_944, num_heads=28, num_kv_heads=4, head_dim=128, rope=_LONG,
)
_0_5B = replace(
    _7B, vocab=151_936, num_layers=24, dim=896, mlp_dim=4864, num_heads=14, num_kv_heads=2, head_dim=64, tied=True,
    rope=replace(_LONG, dim=64),
)
_1_5B = replace(_7B, vocab=151_936, dim=1536, mlp_dim=8960, num_heads=12, num_kv_heads=2, tied=True)
# The instruction-tuned 14B and larger have a norm_eps of 1e-6.
_14B = replace(_7B, num_layers=48, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=8, norm_eps=1e-5)
_72B = replace(_14B, num_layers=80, dim=8192, mlp_dim=29_568, num_heads=64)
PRESETS = {
    "qwen2-0.5b": _0_5B,
    "qwen2-1.5b": _1_5B,
    "qwen2-7b": _7B,
    "qwen2-72b": _72B,
    "qwen2.5-0.5b": replace(_0_5B, rope=replace(_SHORT, dim=64)),
    "qwen2.5-1.5b": _1_5B,
    "qwen2.5-3b": replace(_1_5B, num_layers=36, dim=2048, mlp_dim=11_008, num_heads=16, rope=_SHORT),
    "qwen2.5-7b": _7B,
    "qwen2.5-14b": _14B,
    "qwen2.5-32b": replace(_14B, num_layers=64, mlp_dim=27_648),
    "qwen2.5-72b": _72B,
}
# fmt: on

FAMILY = Family("qwen2", Qwen2, FIELDS, llama_table, PRESETS)
