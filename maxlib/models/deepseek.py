"""DeepSeek V2 and V3/R1, Kimi K2 (DeepSeek-AI 2024, arXiv:2405.04434, 2412.19437): latent attention, many small
experts, and shared ones.

V3 differs from V2 in its router only; Kimi K2 is V3 with other numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, Table, hf, hf_fields, hf_mtp, names, rope_to_hf

# Fields that one version computes with this value only. V2 with norm_topk_prob: transformers and DeepSeek's differ.
_V2_FIXED = {"scoring_func": "softmax", "norm_topk_prob": False}
_V3_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _read_version(fields: HFConfig, c: Any) -> int:
    version = 2 if fields.require("model_type", *Config.model_types) == "deepseek_v2" else 3
    for name, value in (_V2_FIXED if version == 2 else _V3_FIXED).items():
        fields.require(name, value)
    return version


def _write_version(version: int, cfg: Any) -> dict[str, Any]:
    """Writes the fields that depend on it; Kimi K2 becomes a deepseek_v3, which is what transformers knows it as."""
    method = "group_limited_greedy" if cfg.num_groups > 1 else "greedy"
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        **(_V2_FIXED | {"topk_method": method} if version == 2 else _V3_FIXED),
    }


def _read_rope(fields: HFConfig, c: Any) -> Rope:
    turned = fields.take("qk_rope_head_dim", kind=int)
    fields.require("head_dim", turned)
    fields.require("qk_head_dim", c.nope_dim + turned)
    interleaved = c.version == 2 or fields.take("rope_interleave", True)
    return fields.rope(head_dim=turned, interleaved=interleaved)


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    interleave = {} if cfg.version == 2 else {"rope_interleave": rope.interleaved}
    written = rope_to_hf(rope, head_dim=rope.dim, interleaved=cfg.version == 2 or rope.interleaved)
    return {"qk_rope_head_dim": rope.dim, **interleave, **written}


def _groups(name: str, v3: int) -> Any:
    """Declares a number of groups of experts, which is one where V2 chooses among all of them."""

    def read(fields: HFConfig, c: Any) -> int:
        if c.version == 3:
            return fields.take(name, v3)
        grouped = fields.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
        number = fields.take(name, 1)
        return number if grouped else 1

    return hf_fields(read, lambda value, cfg: {name: value}, default=1)


def _since(v2: Any, v3: Any) -> Callable[[Any], Any]:
    return lambda c: v2 if c.version == 2 else v3


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a DeepSeek; `PRESETS` has the published ones.

    Version 2 scores experts by softmax and groups by their best expert; 3 by sigmoid, with a bias that balances the
    load, and groups by their best two.
    """

    model_types = ("deepseek_v2", "deepseek_v3", "kimi_k2")
    fixed = {"hidden_act": "silu", "moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False}

    version: Literal[2, 3] = hf_fields(_read_version, _write_version)
    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    num_dense: int = hf("first_k_dense_replace", absent=_since(0, 3))  # number of first layers with a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads", same=("num_key_value_heads",))
    q_rank: int | None = hf("q_lora_rank", absent=1536)  # None: queries have no latent
    kv_rank: int = hf("kv_lora_rank")
    nope_dim: int = hf("qk_nope_head_dim")
    v_dim: int = hf("v_head_dim")
    rope: Rope = hf_fields(_read_rope, _write_rope)
    num_experts: int = hf("n_routed_experts")
    num_shared: int = hf("n_shared_experts")
    top_k: int = hf("num_experts_per_tok")
    num_groups: int = _groups("n_group", 8)
    top_groups: int = _groups("topk_group", 4)
    renormalize: bool = hf_fields(
        lambda fields, c: c.version == 3 and fields.take("norm_topk_prob", True),
        lambda value, cfg: {"norm_topk_prob": value},
        default=False,
    )
    routed_scale: float = hf("routed_scaling_factor", 1.0, absent=_since(1.0, 2.5))
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    losses: tuple[Any, ...] = ()  # router losses for training
    num_mtp: int = 0  # multi-token prediction modules (`predict_ahead`) of the model ...
    stored_mtp: int = hf_mtp(absent=0)  # ... and of the checkpoint


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    # Keys and values are computed from one latent [B, T, R] per token for all heads, R = 512: a cache only stores it
    # and one rotary key of 64. A query has nope_dim dimensions without position and rope.dim rotated ones.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    ranks: Any = dict(q_rank=cfg.q_rank, kv_rank=cfg.kv_rank, nope_dim=cfg.nope_dim, v_dim=cfg.v_dim)
    # The norms of the latents have the default epsilon, independent of `norm_eps`.
    return nn.MLA(cfg.dim, num_heads=cfg.num_heads, **ranks, rope=cfg.rope, scale=scale, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Experts form groups, one per node; a token uses the k best experts of the best groups only, which limits traffic.
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups, scores_per_group=cfg.version - 1)
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        score=jax.nn.softmax if cfg.version == 2 else jax.nn.sigmoid,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        groups=groups if cfg.top_groups < cfg.num_groups else None,
        expert_bias=cfg.version == 3,  # affects the choice, not the weights: balances the load without a loss
        rngs=rngs,
    )
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


class DeepSeek(nn.Decoder):
    """DeepSeek: multi-head latent attention, fine-grained experts, and `cfg.num_mtp` multi-token prediction modules."""

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


def _yarn(factor: float, mscale: float, *, theta: float = 1e4, fast: float = 32.0, reach: int = 163_840) -> Rope:
    scaling = Yarn(factor, 4096, beta_fast=fast, mscale=mscale, mscale_all_dim=mscale)
    return Rope(64, theta, scaling, interleaved=True, max_length=reach)


# fmt: off
_V2 = Config(
    version=2, vocab=102_400, num_layers=60, num_dense=1, dim=5120, mlp_dim=12_288, expert_dim=1536, num_heads=128,
    q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128, rope=_yarn(40.0, 1.0),
    num_experts=160, num_shared=2, top_k=6, num_groups=8, top_groups=3, routed_scale=16.0,
)
_V2_LITE = replace(
    _V2, num_layers=27, dim=2048, mlp_dim=10_944, expert_dim=1408, num_heads=16, q_rank=None, rope=_yarn(40.0, 0.707),
    num_experts=64, num_groups=1, top_groups=1, routed_scale=1.0,
)
_V3 = replace(
    _V2, version=3, vocab=129_280, num_layers=61, num_dense=3, dim=7168, mlp_dim=18_432, expert_dim=2048,
    num_experts=256, num_shared=1, top_k=8, top_groups=4, renormalize=True, routed_scale=2.5,
)
_KIMI_K2 = replace(
    _V3, vocab=163_840, num_dense=1, num_heads=64, rope=_yarn(32.0, 1.0, theta=5e4, fast=1.0, reach=131_072),
    num_experts=384, num_groups=1, top_groups=1, routed_scale=2.827,
)
PRESETS = {
    "deepseek-v2-lite": _V2_LITE, "deepseek-v2": _V2, "deepseek-v3": _V3, "deepseek-r1": _V3, "kimi-k2": _KIMI_K2,
}
# fmt: on

FAMILY = Family(name="deepseek", model=DeepSeek, config=Config, table=_table, presets=PRESETS)
