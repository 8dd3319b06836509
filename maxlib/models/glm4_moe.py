"""GLM-4.5, 4.5-Air and 4.6 (GLM team 2025, arXiv:2508.06471): half of each head rotated, and DeepSeek V3's experts."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_mtp, hf_rope, names


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a GLM-4 with experts; `PRESETS` has the published ones."""

    model_types = ("glm4_moe",)
    architecture = "Glm4MoeForCausalLM"
    fixed = {"hidden_act": "silu"}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    num_dense: int = hf("first_k_dense_replace", absent=1)  # number of first layers with a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=lambda c: c.dim // c.num_heads)
    rope: Rope = hf_rope(partial=True, default_fraction=0.5)
    num_experts: int = hf("n_routed_experts")
    num_shared: int = hf("n_shared_experts")
    top_k: int = hf("num_experts_per_tok")
    num_groups: int = hf("n_group", 1)
    top_groups: int = hf("topk_group", 1)
    renormalize: bool = hf("norm_topk_prob", True)
    routed_scale: float = hf("routed_scaling_factor", 1.0)
    norm_eps: float = hf("rms_norm_eps", 1e-5)
    qk_norm: bool = hf("use_qk_norm", False)  # norm queries and keys head by head
    attention_bias: bool = hf("attention_bias", False)
    tied: bool = hf("tie_word_embeddings", False)
    losses: tuple[Any, ...] = ()  # router losses for training
    num_mtp: int = 0  # multi-token prediction modules (`predict_ahead`) of the model ...
    stored_mtp: int = hf_mtp(absent=1)  # ... and of the checkpoint

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json."""
        # Left out it would mean a half; a rope of whole heads has no field of its own.
        return {"partial_rotary_factor": 1.0} | super().to_hf()


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Sigmoid scores; a bias on the choice of experts, but not on their weights, balances the load.
    choice: Any = dict(score=jax.nn.sigmoid, renormalize=cfg.renormalize, scale=cfg.routed_scale, expert_bias=True)
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, groups=groups, **choice, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Block(nn.Layer):
    """Llama's layer; from the `num_dense`th on with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        D = cfg.dim
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # The rope turns the first half of each head; the rest carries no position.
        self.attn = nn.Attention(
            D, **heads, rope=cfg.rope, bias=cfg.attention_bias, q_norm=norm(), k_norm=norm(), rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux


class GLM4MoE(nn.Decoder):
    """GLM-4 with experts: grouped-query attention under DeepSeek V3's experts, and modules that look ahead."""

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
    # What a layer lacks (norms of heads, biases, experts, an MLP) is passed over.
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE]
    modules = {"used": cfg.num_mtp, "stored": cfg.stored_mtp, "tied": cfg.tied}
    return [*names.decoder_table(layer), *names.mtp_table(layer, first=cfg.num_layers, **modules)]


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

FAMILY = Family(name="glm4_moe", model=GLM4MoE, config=Config, table=_table, presets=PRESETS)
