"""GLM-4.5, 4.5-Air and 4.6: half-turned heads, and DeepSeek V3's experts (arXiv:2508.06471)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, names, rope_to_hf, written

# Our fields, and what config.json calls them; with what it means by leaving one out, as in transformers.
_SIZES = {
    "vocab": "vocab_size",
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "expert_dim": "moe_intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_experts": "n_routed_experts",
    "num_shared": "n_shared_experts",
    "top_k": "num_experts_per_tok",
}
_OTHERS = {
    "num_dense": ("first_k_dense_replace", 1),
    "num_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "renormalize": ("norm_topk_prob", True),
    "routed_scale": ("routed_scaling_factor", 1.0),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "qk_norm": ("use_qk_norm", False),
    "attention_bias": ("attention_bias", False),
    "tied": ("tie_word_embeddings", False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one GLM-4 with experts from another; `PRESETS` has the published ones.

    num_dense: how many first layers have a plain MLP. qk_norm: whether queries and keys are normed head by head.
    losses: what the routers report for training. num_mtp: how many modules look further ahead than the next token
    (`predict_ahead`), of `stored_mtp` that the checkpoint has.
    """

    vocab: int
    num_layers: int
    num_dense: int
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
    qk_norm: bool = False
    attention_bias: bool = False
    tied: bool = False
    losses: tuple[Any, ...] = ()
    num_mtp: int = 0
    stored_mtp: int = dataclasses.field(default=0, compare=False)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "glm4_moe")
        fields.require("hidden_act", "silu")
        read = fields.read(_SIZES | _OTHERS)
        head_dim = fields.take("head_dim", read["dim"] // read["num_heads"])
        return cls(
            **read,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim, partial=True, default_fraction=0.5),
            stored_mtp=fields.take("num_nextn_predict_layers", 1),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's GLM does not have."""
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **written(self, _SIZES | _OTHERS),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "num_nextn_predict_layers": self.num_mtp,
            "partial_rotary_factor": 1.0,  # half, if nobody says; the rope's own stands in its place
            **rope_to_hf(self.rope, head_dim=self.head_dim),
        }


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps) if cfg.qk_norm else None
    return nn.Attention(
        cfg.dim,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        rope=cfg.rope,
        bias=cfg.attention_bias,
        q_norm=norm(),
        k_norm=norm(),
        rngs=rngs,
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        score=jax.nn.sigmoid,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        groups=nn.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None,
        expert_bias=True,
        rngs=rngs,
    )
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Block(nnx.Module):
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

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class GLM4MoE(nn.MTPDecoder):
    """A decoder, `docs/decisions/0001`, with `cfg.num_mtp` modules that look ahead."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        layer = lambda i, rngs: Block(cfg, dense=i < cfg.num_dense, rngs=rngs)
        self.layers = nn.Stack(layer, cfg.num_layers, lead=min(cfg.num_dense, cfg.num_layers), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        module = lambda: nn.MTP(cfg.dim, block=Block(cfg, dense=False, rngs=rngs), eps=cfg.norm_eps, rngs=rngs)
        self.mtp = nnx.List([module() for _ in range(cfg.num_mtp)])


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights. What a layer does not have (norms, biases, experts, an MLP) is passed
    over.
    """
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE]
    modules = {"used": cfg.num_mtp, "stored": cfg.stored_mtp, "tied": cfg.tied}
    return [*names.decoder_table(layer), *names.mtp_table(layer, first=cfg.num_layers, **modules)]


# fmt: off
_AIR = Config(
    vocab=151_552, num_layers=46, num_dense=1, dim=4096, mlp_dim=10_944, expert_dim=1408, num_heads=96, num_kv_heads=8,
    head_dim=128, rope=Rope(64, 1_000_000.0, max_length=131_072), num_experts=128, num_shared=1, top_k=8,
    attention_bias=True,
)
_355B = dataclasses.replace(
    _AIR, num_layers=92, num_dense=3, dim=5120, mlp_dim=12_288, expert_dim=1536, num_experts=160, routed_scale=2.5,
    qk_norm=True,
)
# fmt: on
PRESETS = {
    "glm-4.5-air": _AIR,
    "glm-4.5": _355B,
    "glm-4.6": dataclasses.replace(_355B, rope=Rope(64, 1_000_000.0, max_length=202_752)),
}

FAMILY = Family(name="glm4_moe", model_types=("glm4_moe",), model=GLM4MoE, config=Config, table=_table, presets=PRESETS)
