"""DeepSeek V2 and V3/R1, Kimi K2 (DeepSeek-AI 2024, arXiv:2405.04434, 2412.19437): latent attention, many small
experts, and shared ones.

V3 has another router than V2, and modules that predict a second token ahead (multi-token prediction); Kimi K2 has V3's
architecture in other sizes.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, deepseek_experts, latent_attention
from maxlib.models._sizes import ExpertSizes, MTPSizes, RotatedLatentSizes, mtp_table
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(RotatedLatentSizes, ExpertSizes, MTPSizes):
    """Sizes of a DeepSeek; `PRESETS` has the published ones, `_sizes.py` the fields that other families have too.

    Version 2 scores experts by softmax, and a group of experts by its best score. Version 3 scores experts by sigmoid,
    adds a bias that balances the load, and scores a group by the sum of its two best scores. With `renormalize`, the
    weights of a token's experts are divided by their sum.
    """

    version: Literal[2, 3]
    renormalize: bool = False


class Block(PreNorm):
    """Pre-norm layer of latent attention, with an MLP in the first `num_dense` layers and experts in all others.

    Keys and values of all heads are projections of one small vector per token, the latent, and only that is cached.
    `PreNorm` (`_layers.py`) has the forward pass.
    """

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = latent_attention(cfg, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Experts form groups, one per node; a token uses the k best experts of the best groups only, which limits traffic.
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups, scores_per_group=1 if cfg.version == 2 else 2)
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
    return deepseek_experts(cfg, router=router, rngs=rngs)


class DeepSeek(TextDecoder):
    """DeepSeek: multi-head latent attention, fine-grained experts, and `cfg.num_mtp` multi-token prediction modules."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        # `cfg.dense` says of each layer whether it has a plain MLP.
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)
        blocks = [Block(cfg, dense=False, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List([nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, rngs=rngs) for block in blocks])


# In the functions below `hf` has the fields of config.json, and `c` the sizes read so far.

# The only values that each version supports. V2 with norm_topk_prob=True is refused, because the implementations of
# transformers and of DeepSeek disagree about it.
_FIXED = {
    2: {"scoring_func": "softmax", "norm_topk_prob": False},
    3: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
# V2 always rotates neighbouring dimensions together; V3's config.json says whether it does.
_ROPES = {2: fields.latent_rope(interleaved=True), 3: fields.latent_rope()}


def _read_version(hf: HFConfig, c: Any) -> int:
    version = 2 if c.model_type == "deepseek_v2" else 3
    for name, value in _FIXED[version].items():
        hf.require(name, value)
    return version


def _write_version(version: int, cfg: Any) -> dict[str, Any]:
    method = "group_limited_greedy" if cfg.num_groups > 1 else "greedy"
    return {"topk_method": method} | _FIXED[version]  # for V3, its fixed "noaux_tc" replaces the method


def _groups(name: str, hf_name: str, v3: int) -> Computed:
    """Makes the entry for a number of expert groups; V2 has one group unless its `topk_method` limits groups.

    Args:
        name: Name in the configuration.
        hf_name: Name in config.json.
        v3: Value if a V3 config omits it.
    """

    def read(hf: HFConfig, c: Any) -> int:
        if c.version == 3:
            return hf.take(hf_name, v3)
        grouped = hf.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
        number = hf.take(hf_name, 1)
        return number if grouped else 1

    return Computed(name, read, lambda value, cfg: {hf_name: value})


def _read_renormalize(hf: HFConfig, c: Any) -> bool:
    return c.version == 3 and hf.take("norm_topk_prob", True)


FIELDS = Fields(
    Config,
    [
        Computed("version", _read_version, _write_version),
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.MLA,
        Computed(
            "rope",
            lambda hf, c: _ROPES[c.version].read(hf, c),
            lambda value, cfg: _ROPES[cfg.version].write(value, cfg),
        ),
        *fields.DEEPSEEK_EXPERTS,
        fields.NUM_SHARED,
        _groups("num_groups", "n_group", v3=8),
        _groups("top_groups", "topk_group", v3=4),
        Computed("renormalize", _read_renormalize, lambda value, cfg: {"norm_topk_prob": value}),
        fields.mtp(absent=0),
    ],
    model_types={
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",  # written as deepseek_v3, the type that transformers has
    },
    model_type=lambda cfg: f"deepseek_v{cfg.version}",
    fixed={
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": fields.num_heads,
    },
    absent={
        "num_dense": lambda c: 0 if c.version == 2 else 3,
        "q_rank": 1536,
        "routed_scale": lambda c: 1.0 if c.version == 2 else 2.5,
    },
)


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    return mtp_table(cfg, layer)


def _yarn(
    factor: float, mscale: float, *, theta: float = 1e4, beta_fast: float = 32.0, max_length: int = 163_840
) -> Rope:
    scaling = YarnScaling(factor, 4096, beta_fast=beta_fast, mscale=mscale, mscale_all_dim=mscale)
    return Rope(64, theta, scaling, interleaved=True, max_length=max_length)


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
    _V3, vocab=163_840, num_dense=1, num_heads=64, rope=_yarn(32.0, 1.0, theta=5e4, beta_fast=1.0, max_length=131_072),
    num_experts=384, num_groups=1, top_groups=1, routed_scale=2.827,
)
PRESETS = {
    "deepseek-v2-lite": _V2_LITE, "deepseek-v2": _V2, "deepseek-v3": _V3, "deepseek-r1": _V3, "kimi-k2": _KIMI_K2,
}
# fmt: on

FAMILY = Family("deepseek", DeepSeek, FIELDS, _table, PRESETS)
