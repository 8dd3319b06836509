"""Hy3 (Tencent 2026): Qwen3's attention, many small experts, a shared one, and a sigmoid router."""

from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention, deepseek_experts
from maxlib.models._sizes import AttentionSizes, ExpertSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, Ignore, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, ExpertSizes):
    """Sizes of a Hy3; `PRESETS` has the published ones."""

    num_shared: int = 1
    routed_scale: float = 2.826
    norm_eps: float = 1e-5
    attention_bias: bool = False
    stored_mtp: int = field(default=0, compare=False)  # prediction modules in the files, which are passed over


class Block(PreNorm):
    """Llama's layer with norms on the heads of queries and keys; after the first `num_dense` with experts."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class Hy3(TextDecoder):
    """Hy3: 295B parameters (21B active); a rope with theta 11,158,840 for 256k tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.num_dense(),
        fields.MLP,
        *fields.EXPERTS,
        *fields.ATTENTION,
        fields.rope(default_theta=11_158_840.0),
        Field("num_shared", "num_shared_experts"),
        Field("routed_scale", "router_scaling_factor"),
        fields.ATTENTION_BIAS,
        Computed("stored_mtp", lambda hf, c: hf.take("num_nextn_predict_layers", 0), lambda number, cfg: {}),
    ],
    model_types={"hy_v3": "HYV3ForCausalLM"},
    fixed={"hidden_act": "silu", "mlp_bias": False, "expert_hidden_dim": lambda c: c.expert_dim},
    fixed_if_present={
        "qk_norm": True,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
    },
    ignored=("eod_token_id",),  # of training
    absent={"head_dim": 128},
)


def _table(cfg: Config) -> Table:
    experts = [
        Weight("mlp.router.gate.weight", "moe.router.gate.w"),
        Weight("mlp.expert_bias", "moe.router.expert_bias"),
        *names.experts("mlp.experts.{e}.{}_proj"),
        *names.mlp("mlp.shared_mlp.{}_proj", "moe.shared"),
    ]
    modules = [Ignore(f"model.layers.{cfg.num_layers + depth}.*") for depth in range(cfg.stored_mtp)]
    return [*names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *experts]), *modules]


# fmt: off
PRESETS = {
    "hy3": Config(
        vocab=120_832, num_layers=80, num_dense=1, dim=4096, mlp_dim=13_312, expert_dim=1536, num_heads=64,
        num_kv_heads=8, head_dim=128, rope=Rope(128, 11_158_840.0, max_length=262_144), num_experts=192, top_k=8,
    )
}
# fmt: on

FAMILY = Family("hy3", Hy3, FIELDS, _table, PRESETS)
