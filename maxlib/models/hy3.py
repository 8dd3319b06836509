"""Hy3 (Tencent 2026): Qwen3's attention, many small experts, a shared one, and a sigmoid router."""

from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, Ignore, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Hy3; `PRESETS` has the published ones."""

    num_dense: int  # number of first layers with a plain MLP
    mlp_dim: int
    expert_dim: int
    num_experts: int
    num_shared: int = 1
    top_k: int
    routed_scale: float = 2.826
    norm_eps: float = 1e-5
    attention_bias: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training
    stored_mtp: int = field(default=0, compare=False)  # prediction modules in the files, which are passed over


class Block(PreNorm):
    """Llama's layer with norms on the heads of queries and keys; after the first `num_dense` with experts."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.router.sigmoid_router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, scale=cfg.routed_scale, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Hy3(nn.Decoder):
    """Hy3: 295B parameters, of which a token uses 21B; a rope with theta 11,158,840 for 256k tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


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
    # They say what is computed in float32, or by which kernel.
    ignored=(
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "enable_moe_fp32_combine",
        "use_grouped_mm",
        "eod_token_id",  # of training
    ),
    absent={"head_dim": 128},
)


def _table(cfg: Config) -> Table:
    parts = ("gate", "up", "down")
    experts = [
        Weight("mlp.router.gate.weight", "moe.router.gate.w"),
        Weight("mlp.expert_bias", "moe.router.expert_bias"),
        *[Weight(f"mlp.experts.{{e}}.{part}_proj.weight", f"moe.{part}.w", "O I -> e O I") for part in parts],
        *[Weight(f"mlp.shared_mlp.{part}_proj.weight", f"moe.shared.{part}.w") for part in parts],
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
