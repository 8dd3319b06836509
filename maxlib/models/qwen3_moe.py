"""Qwen3, mixture of experts (Qwen team 2025, arXiv:2505.09388): Qwen3's attention, and many small experts instead of
an MLP.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, MIXED, MixedSizes, causal
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(MixedSizes):
    """Sizes of a Qwen3 with experts; `PRESETS` has the published ones."""

    window: int | None = None  # of all layers
    attention_bias: bool = False


class Block(PreNorm):
    """Qwen3's layer, with experts or with an MLP."""

    def __init__(self, cfg: Config, *, sparse: bool, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(
            cfg, mask=causal(cfg.window), rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts, of which a token takes the best k: 8 of 128.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class Qwen3MoE(TextDecoder):
    """Qwen3 with experts: no shared expert, and no layer without experts in the published ones."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda sparse, rngs: Block(cfg, sparse=sparse, rngs=rngs), cfg.sparse, rngs=rngs)


def _read_num_experts(hf: HFConfig, c: Any) -> int:
    """Called `num_experts` by transformers 4, `num_local_experts` by 5."""
    local = hf.take("num_local_experts", None, kind=int)
    return hf.take("num_experts", 128) if local is None else hf.require("num_experts", local)


def _read_window(hf: HFConfig, c: Any) -> int | None:
    window = fields.switched_window(hf, absent=4096)
    if window is None:
        hf.ignore("max_window_layers")
    else:
        hf.require("max_window_layers", 0)  # transformers 4 and 5 disagree on what else would mean
    return window


def _write_window(window: int | None, cfg: Any) -> dict[str, Any]:
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


FIELDS = Fields(
    Config,
    [
        *DECODER,
        Field("expert_dim", "moe_intermediate_size"),
        fields.rope(),
        Computed("num_experts", _read_num_experts, lambda number, cfg: {"num_experts": number}),
        Field("top_k", "num_experts_per_tok"),
        *MIXED,
        Computed("window", _read_window, _write_window),
        fields.ATTENTION_BIAS,
    ],
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0},
    absent={"head_dim": fields.equal_heads, "renormalize": False},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (experts or an MLP) is passed over.
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE])


# fmt: off
_30B = Config(
    vocab=151_936, num_layers=48, dim=2048, mlp_dim=6144, expert_dim=768, num_heads=32, num_kv_heads=4, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=40_960), num_experts=128, top_k=8,
)
_235B = replace(_30B, num_layers=94, dim=4096, mlp_dim=12_288, expert_dim=1536, num_heads=64)
_LONG = Rope(128, 10_000_000.0, max_length=262_144)
PRESETS = {
    "qwen3-30b-a3b": _30B,
    "qwen3-30b-a3b-2507": replace(_30B, rope=_LONG),
    "qwen3-235b-a22b": _235B,
    "qwen3-235b-a22b-2507": replace(_235B, rope=Rope(128, 5_000_000.0, max_length=262_144)),
    "qwen3-coder-480b-a35b": replace(
        _30B, num_layers=62, dim=6144, mlp_dim=8192, expert_dim=2560, num_heads=96, num_kv_heads=8, rope=_LONG,
        num_experts=160,
    ),
}
# fmt: on

FAMILY = Family("qwen3_moe", Qwen3MoE, FIELDS, _table, PRESETS)
