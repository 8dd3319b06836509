"""GLM-4.7-Flash (GLM team 2026): DeepSeek's latent attention, with the router and experts of GLM-4.5."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import (
    Family,
    HFConfig,
    ModelConfig,
    Table,
    hf,
    hf_fields,
    hf_mtp,
    hf_num_dense,
    names,
    rope_to_hf,
)


def _read_rope(fields: HFConfig, c: Any) -> Rope:
    turned = fields.take("qk_rope_head_dim", kind=int)
    fields.require("head_dim", turned)
    fields.require("qk_head_dim", c.nope_dim + turned)
    return fields.rope(head_dim=turned, interleaved=fields.take("rope_interleave", True))


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    written = rope_to_hf(rope, head_dim=rope.dim, whole_heads=True, interleaved=rope.interleaved)
    return {"qk_rope_head_dim": rope.dim, "rope_interleave": rope.interleaved, **written}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a GLM-4.7-Flash; `PRESETS` has the published ones."""

    model_types = ("glm4_moe_lite",)
    architecture = "Glm4MoeLiteForCausalLM"
    fixed = {"hidden_act": "silu", "attention_bias": False}
    fixed_if_present = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "mlp_bias": False, "moe_layer_freq": 1}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    num_dense: int = hf_num_dense()  # number of first layers with a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads", same=("num_key_value_heads",))
    q_rank: int | None = hf("q_lora_rank", absent=768)  # None: queries have no latent
    kv_rank: int = hf("kv_lora_rank")
    nope_dim: int = hf("qk_nope_head_dim")
    v_dim: int = hf("v_head_dim")
    rope: Rope = hf_fields(_read_rope, _write_rope)
    num_experts: int = hf("n_routed_experts")
    num_shared: int = hf("n_shared_experts")
    top_k: int = hf("num_experts_per_tok")
    num_groups: int = hf("n_group", 1)
    top_groups: int = hf("topk_group", 1)
    renormalize: bool = hf("norm_topk_prob", True)
    routed_scale: float = hf("routed_scaling_factor", 1.8)
    norm_eps: float = hf("rms_norm_eps", 1e-5)
    tied: bool = hf("tie_word_embeddings", False)
    losses: tuple[Any, ...] = ()  # router losses for training
    num_mtp: int = 0  # multi-token prediction modules (`predict_ahead`) of the model ...
    stored_mtp: int = hf_mtp(absent=0)  # ... and of the checkpoint


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    # The cache stores one latent [B, T, R] per token for all heads, R = 512, and one rotary key of 64.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    ranks: Any = dict(q_rank=cfg.q_rank, kv_rank=cfg.kv_rank, nope_dim=cfg.nope_dim, v_dim=cfg.v_dim)
    # The norms of the latents have the default epsilon, independent of `norm_eps`.
    return nn.MLA(cfg.dim, num_heads=cfg.num_heads, **ranks, rope=cfg.rope, scale=scale, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Sigmoid scores; a bias on the choice of experts, but not on their weights, balances the load.
    choice: Any = dict(score=jax.nn.sigmoid, renormalize=cfg.renormalize, scale=cfg.routed_scale, expert_bias=True)
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, groups=groups, **choice, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


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
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux


class GLM4MoELite(nn.Decoder):
    """GLM-4.7-Flash: 30B parameters of which a token uses 3B, with a cache of 576 numbers per token and layer."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        module = lambda: nn.mtp.MTP(cfg.dim, block=Block(cfg, dense=False, rngs=rngs), eps=cfg.norm_eps, rngs=rngs)
        self.mtp = nnx.List([module() for _ in range(cfg.num_mtp)])


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    modules = {"used": cfg.num_mtp, "stored": cfg.stored_mtp, "tied": cfg.tied}
    return [*names.decoder_table(layer), *names.mtp_table(layer, first=cfg.num_layers, **modules)]


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

FAMILY = Family(name="glm4_moe_lite", model=GLM4MoELite, config=Config, table=_table, presets=PRESETS)
