"""GLM-4.7-Flash (GLM team 2026): DeepSeek's latent attention, with the router and experts of GLM-4.5."""

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Family, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a GLM-4.7-Flash; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    num_dense: int  # number of first layers with a plain MLP
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    q_rank: int | None  # None: queries have no latent
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    num_experts: int
    num_shared: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.8
    norm_eps: float = 1e-5
    tied: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training
    num_mtp: int = 0  # multi-token prediction modules (`predict_ahead`) of the model ...
    stored_mtp: int = field(default=0, compare=False)  # ... and of the checkpoint


class Block(nn.Layer):
    """Pre-norm layer of latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return nn.residual(x, h, "mlp"), cache, aux


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    # The cache stores one latent [B, T, R] per token for all heads, R = 512, and one rotary key of 64.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    # The norms of the latents have the default epsilon, independent of `norm_eps`.
    return nn.MLA(
        cfg.dim,
        num_heads=cfg.num_heads,
        q_rank=cfg.q_rank,
        kv_rank=cfg.kv_rank,
        nope_dim=cfg.nope_dim,
        v_dim=cfg.v_dim,
        rope=cfg.rope,
        scale=scale,
        rngs=rngs,
    )


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


class GLM4MoELite(nn.Decoder):
    """GLM-4.7-Flash: 30B parameters of which a token uses 3B, with a cache of 576 numbers per token and layer."""

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
        fields.num_dense(),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.MLA,
        fields.latent_rope(),
        fields.NUM_SHARED,
        *fields.GROUPS,
        fields.mtp(absent=0),
    ],
    model_types={"glm4_moe_lite": "Glm4MoeLiteForCausalLM"},
    fixed={"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": fields.num_heads},
    fixed_if_present={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "mlp_bias": False, "moe_layer_freq": 1},
    absent={"q_rank": 768},
)


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    modules = names.mtp_table(layer, first=cfg.num_layers, used=cfg.num_mtp, stored=cfg.stored_mtp, tied=cfg.tied)
    return [*names.decoder_table(layer), *modules]


# fmt: off
PRESETS = {
    "glm-4.7-flash": Config(
        vocab=154_880, num_layers=47, num_dense=1, dim=2048, mlp_dim=10_240, expert_dim=1536, num_heads=20,
        q_rank=768, kv_rank=512, nope_dim=192, v_dim=256,
        rope=Rope(64, 1_000_000.0, interleaved=True, max_length=202_752),
        num_experts=64, num_shared=1, top_k=4,
    )
}
# fmt: on

FAMILY = Family("glm4_moe_lite", GLM4MoELite, FIELDS, _table, PRESETS)
