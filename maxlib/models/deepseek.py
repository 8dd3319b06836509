"""DeepSeek V2 and V3/R1, Kimi K2: latent attention, and many small experts beside shared ones (arXiv:2405.04434,
2412.19437).

V3 differs from V2 in its router only; Kimi K2 is V3 with other numbers.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, Weight, names, rope_to_hf, written

# Our fields, and what config.json calls them; with what it means by leaving one out, as in transformers.
_SIZES = {
    "vocab": "vocab_size",
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "expert_dim": "moe_intermediate_size",
    "num_heads": "num_attention_heads",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "v_dim": "v_head_dim",
    "num_experts": "n_routed_experts",
    "num_shared": "n_shared_experts",
    "top_k": "num_experts_per_tok",
}
_OTHERS = {"norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False)}
_V2_CHOICE = {
    "num_dense": ("first_k_dense_replace", 0),
    "num_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "routed_scale": ("routed_scaling_factor", 1.0),
}
_V3_CHOICE = {
    "num_dense": ("first_k_dense_replace", 3),
    "num_groups": ("n_group", 8),
    "top_groups": ("topk_group", 4),
    "routed_scale": ("routed_scaling_factor", 2.5),
    "renormalize": ("norm_topk_prob", True),
}
# Fields that must have this value, for nothing else is computed.
_FIXED = {"hidden_act": "silu", "moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False}
_V2_FIXED = {"scoring_func": "softmax", "norm_topk_prob": False}  # transformers and DeepSeek's code differ on True
_V3_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one DeepSeek from another; `PRESETS` has the published ones.

    version: 2 scores experts by softmax and groups by their best expert; 3 by sigmoid, with a expert_bias that balances
    the load, and groups by their best two. num_dense: how many first layers have a plain MLP. losses: what the routers
    report for training. num_mtp: how many modules look further ahead than the next token (`predict_ahead`), of
    `stored_mtp` that the checkpoint has.
    """

    version: Literal[2, 3]
    vocab: int
    num_layers: int
    num_dense: int
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    num_experts: int
    num_shared: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = False
    routed_scale: float = 1.0
    norm_eps: float = 1e-6
    tied: bool = False
    losses: tuple[Any, ...] = ()
    num_mtp: int = 0
    stored_mtp: int = dataclasses.field(default=0, compare=False)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        version = 2 if fields.require("model_type", "deepseek_v2", "deepseek_v3", "kimi_k2") == "deepseek_v2" else 3
        read = fields.read(_SIZES | _OTHERS) | _read_choice(fields, version)
        turned = fields.take("qk_rope_head_dim", kind=int)
        fields.require("num_key_value_heads", read["num_heads"])
        fields.require("qk_head_dim", read["nope_dim"] + turned)
        fields.require("head_dim", turned)
        for name, value in (_FIXED | (_V2_FIXED if version == 2 else _V3_FIXED)).items():
            fields.require(name, value)
        return cls(
            version=version,
            **read,
            q_rank=fields.take("q_lora_rank", 1536, nullable=True),
            rope=fields.rope(head_dim=turned, interleaved=version == 2 or fields.take("rope_interleave", True)),
            stored_mtp=fields.take("num_nextn_predict_layers", 0),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json; Kimi K2 becomes a deepseek_v3, which is what transformers knows it as."""
        own = _V3_FIXED | {"rope_interleave": self.rope.interleaved}
        if self.version == 2:
            own = _V2_FIXED | {"topk_method": "group_limited_greedy" if self.num_groups > 1 else "greedy"}
        return {
            "architectures": [f"DeepseekV{self.version}ForCausalLM"],
            "model_type": f"deepseek_v{self.version}",
            **_FIXED,
            **own,
            **written(self, _SIZES | _OTHERS | _V3_CHOICE),
            "num_key_value_heads": self.num_heads,
            "qk_rope_head_dim": self.rope.dim,
            "q_lora_rank": self.q_rank,
            "num_nextn_predict_layers": self.num_mtp,
            **rope_to_hf(self.rope, head_dim=self.rope.dim, interleaved=self.version == 2 or self.rope.interleaved),
        }


def _read_choice(fields: HFConfig, version: int) -> dict[str, Any]:
    """Which layers have experts, and how these are chosen and weighed."""
    if version == 3:
        return fields.read(_V3_CHOICE)
    grouped = fields.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return fields.read(_V2_CHOICE) | ({} if grouped else {"num_groups": 1, "top_groups": 1})


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return nn.MLA(
        cfg.dim,
        num_heads=cfg.num_heads,
        q_rank=cfg.q_rank,
        kv_rank=cfg.kv_rank,
        nope_dim=cfg.nope_dim,
        v_dim=cfg.v_dim,
        rope=cfg.rope,
        scale=scale,
        rngs=rngs,  # the norms of the latents have the default epsilon, whatever `norm_eps`
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.GroupLimit(cfg.num_groups, cfg.top_groups, best=cfg.version - 1)
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        score=jax.nn.softmax if cfg.version == 2 else jax.nn.sigmoid,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        groups=groups if cfg.top_groups < cfg.num_groups else None,
        expert_bias=cfg.version == 3,
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


class DeepSeek(nn.MTPDecoder):
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
    """Hugging Face's names for the weights."""
    kv, split = "self_attn.kv_b_proj.weight", "(N H) R -> N H R"
    layer = [
        *names.NORMS,
        Weight(f"self_attn.{'q_proj' if cfg.q_rank is None else 'q_b_proj'}.weight", "attn.q_up.w", split),
        Weight("self_attn.q_a_proj.weight", "attn.q_down.w"),
        Weight("self_attn.q_a_layernorm.weight", "attn.q_norm.scale"),
        Weight("self_attn.kv_a_proj_with_mqa.weight", "attn.kv_down.w"),
        Weight("self_attn.kv_a_layernorm.weight", "attn.kv_norm.scale"),
        Weight(kv, "attn.k_up.w", split, at={"H": 0}),
        Weight(kv, "attn.v_up.w", split, at={"H": cfg.nope_dim}),
        Weight("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> D N H"),
        *names.MLP,
        *names.MOE,
    ]
    modules = {"used": cfg.num_mtp, "stored": cfg.stored_mtp, "tied": cfg.tied}
    return [*names.decoder_table(layer), *names.mtp_table(layer, first=cfg.num_layers, **modules)]


def _yarn(factor: float, mscale: float, *, theta: float = 1e4, fast: float = 32.0, reach: int = 163_840) -> Rope:
    scaling = Yarn(factor, 4096, beta_fast=fast, mscale=mscale, mscale_all_dim=mscale)
    return Rope(64, theta, scaling, interleaved=True, max_length=reach)


# fmt: off
_V2 = Config(
    version=2, vocab=102_400, num_layers=60, num_dense=1, dim=5120, mlp_dim=12_288, expert_dim=1536, num_heads=128,
    q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128, rope=_yarn(40.0, 1.0),
    num_experts=160, num_shared=2, top_k=6, num_groups=8, top_groups=3, routed_scale=16.0,
)
_V2_LITE = dataclasses.replace(
    _V2, num_layers=27, dim=2048, mlp_dim=10_944, expert_dim=1408, num_heads=16, q_rank=None, rope=_yarn(40.0, 0.707),
    num_experts=64, num_groups=1, top_groups=1, routed_scale=1.0,
)
_V3 = dataclasses.replace(
    _V2, version=3, vocab=129_280, num_layers=61, num_dense=3, dim=7168, mlp_dim=18_432, expert_dim=2048,
    num_experts=256, num_shared=1, top_k=8, top_groups=4, renormalize=True, routed_scale=2.5,
)
_KIMI_K2 = dataclasses.replace(
    _V3, vocab=163_840, num_dense=1, num_heads=64, rope=_yarn(32.0, 1.0, theta=5e4, fast=1.0, reach=131_072),
    num_experts=384, num_groups=1, top_groups=1, routed_scale=2.827,
)
# fmt: on

PRESETS = {
    "deepseek-v2-lite": _V2_LITE,
    "deepseek-v2": _V2,
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
    "kimi-k2": _KIMI_K2,
}

FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
    model=DeepSeek,
    config=Config,
    table=_table,
    presets=PRESETS,
)
