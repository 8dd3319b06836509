"""MiniMax-M2, M2.1 and M2.5 (MiniMax 2025): grouped-query attention with norms over all heads, and 256 small
experts.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, SparseSizes, mixtral_experts
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of a MiniMax-M2; `PRESETS` has the published ones."""


class Block(PreNorm):
    """Llama's layer with norms over all heads of queries and of keys, and experts in place of the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # The rope turns the first half of each head; the rest carries no position.
        self.attn = attention(cfg, rope=cfg.rope, qk_norm=True, across_heads=True, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        router = nn.router.sigmoid_router(D, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class MiniMaxM2(TextDecoder):
    """MiniMax-M2: full attention and experts in every layer, without shared experts or dense layers."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    """Returns the rope. The releases say in `rotary_dim` how much of a head turns, transformers in a fraction."""
    rotary = hf.take("rotary_dim", None, kind=int)
    fraction = 1.0 if rotary is None else rotary / c.head_dim
    rope = fields.read_rope(hf, head_dim=c.head_dim, partial=True, default_theta=5_000_000.0, default_fraction=fraction)
    if rotary is not None and rope.dim != rotary:
        raise ValueError(
            f"{hf.where('rotary_dim')} is {rotary}, but partial_rotary_factor turns {rope.dim} of a head's "
            f"{c.head_dim} dimensions: they must agree. Keep the one the weights were trained with."
        )
    return rope


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    return fields.write_rope(rope, head_dim=cfg.head_dim) | {"rotary_dim": rope.dim}


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        *fields.ATTENTION,
        Computed("rope", _read_rope, _write_rope),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
    ],
    model_types={"minimax_m2": "MiniMaxM2ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "attn_type_list": lambda c: [1] * c.num_layers,  # 0 is MiniMax-01's linear attention
    },
    # The releases' files have no prediction modules, whatever these say.
    ignored=("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    absent={"num_kv_heads": 8, "head_dim": 128},
)


def _table(cfg: Config) -> Table:
    moe = "block_sparse_moe"
    router = [
        Weight(f"{moe}.gate.weight", "moe.router.gate.w"),
        Weight(f"{moe}.e_score_correction_bias", "moe.router.expert_bias"),
    ]
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *router, *mixtral_experts(moe)])


# fmt: off
_M2 = Config(
    vocab=200_064, num_layers=62, dim=3072, expert_dim=1536, num_heads=48, num_kv_heads=8, head_dim=128,
    rope=Rope(64, 5_000_000.0, max_length=196_608), num_experts=256, top_k=8,
)
# fmt: on
PRESETS = {"minimax-m2": _M2, "minimax-m2.1": _M2, "minimax-m2.5": _M2}

FAMILY = Family("minimax_m2", MiniMaxM2, FIELDS, _table, PRESETS)
