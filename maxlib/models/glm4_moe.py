"""GLM-4.5, 4.5-Air and 4.6 (GLM team 2025, arXiv:2508.06471): half of each head rotated, and DeepSeek V3's experts."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a GLM-4 with experts; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    num_dense: int  # number of first layers with a plain MLP
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    num_experts: int
    num_shared: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.0
    norm_eps: float = 1e-5
    qk_norm: bool = False  # norm queries and keys head by head
    attention_bias: bool = False
    tied: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training
    num_mtp: int = 0  # multi-token prediction modules (`predict_ahead`) of the model ...
    stored_mtp: int = field(default=0, compare=False)  # ... and of the checkpoint


class Block(nn.Layer):
    """Llama's layer; from the `num_dense`th on with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # The rope turns the first half of each head; the rest carries no position.
        self.attn = nn.Attention(
            D,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            q_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None,
            k_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return nn.residual(x, h, "mlp"), cache, aux


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Sigmoid scores; a bias on the choice of experts, but not on their weights, balances the load.
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        groups=groups,
        score=jax.nn.sigmoid,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        expert_bias=True,
        rngs=rngs,
    )
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class GLM4MoE(nn.Decoder):
    """GLM-4 with experts: grouped-query attention under DeepSeek V3's experts, and modules that look ahead."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        blocks = [Block(cfg, dense=False, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List([nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, rngs=rngs) for block in blocks])


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.5),
        fields.NUM_SHARED,
        *fields.GROUPS,
        Field("qk_norm", "use_qk_norm"),
        fields.ATTENTION_BIAS,
        fields.mtp(absent=1),
    ],
    model_types={"glm4_moe": "Glm4MoeForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_dense": 1, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (norms of heads, biases, experts, an MLP) is passed over.
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE]
    modules = names.mtp_table(layer, first=cfg.num_layers, used=cfg.num_mtp, stored=cfg.stored_mtp, tied=cfg.tied)
    return [*names.decoder_table(layer), *modules]


# fmt: off
_AIR = Config(
    vocab=151_552, num_layers=46, num_dense=1, dim=4096, mlp_dim=10_944, expert_dim=1408, num_heads=96, num_kv_heads=8,
    head_dim=128, rope=Rope(64, 1_000_000.0, max_length=131_072), num_experts=128, num_shared=1, top_k=8,
    attention_bias=True,
)
_355B = replace(
    _AIR, num_layers=92, num_dense=3, dim=5120, mlp_dim=12_288, expert_dim=1536, num_experts=160, routed_scale=2.5,
    qk_norm=True,
)
# fmt: on
PRESETS = {
    "glm-4.5-air": _AIR,
    "glm-4.5": _355B,
    "glm-4.6": replace(_355B, rope=Rope(64, 1_000_000.0, max_length=202_752)),
}

FAMILY = Family("glm4_moe", GLM4MoE, FIELDS, _table, PRESETS)
