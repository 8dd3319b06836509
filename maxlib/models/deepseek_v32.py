"""DeepSeek V3.2 (DeepSeek-AI 2025) and GLM-5 (GLM team 2026): DeepSeek V3 whose queries attend to the 2048 keys that an
indexer chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    Weight,
    hf,
    hf_fields,
    hf_mtp,
    hf_num_dense,
    names,
    rope_to_hf,
)

DEEPSEEK, GLM = "deepseek_v32", "glm_moe_dsa"
SPARSE = "indexed_attention"


def _read_kind(fields: HFConfig, c: Any) -> bool:
    if fields.take("model_type") != GLM:
        return False
    fields.require("indexer_rope_interleave", True)
    # Which layers choose, in three spellings; the others of GLM 5.1 take the choice of a layer before them.
    types, letters = fields.take("indexer_types", None, kind=list), fields.take("index_topk_pattern", None, kind=object)
    every = fields.take("index_topk_freq", 1)
    fields.ignore("index_skip_topk_offset")  # says where every so many begin
    full = set(types) == {"full"} if types else set(letters) <= {"F", "full"} if letters else every <= 1
    if not full:
        raise ValueError(
            f"{fields.where('indexer_types')} must be 'full' for each of the {c.num_layers} layers (index_topk_freq 1): a "
            f"choice that layers share is not computed, got {types or letters or every}"
        )
    return True


def _write_kind(is_glm: bool, cfg: Any) -> dict[str, Any]:
    if not is_glm:
        return {}
    names = {"model_type": GLM, "architectures": ["GlmMoeDsaForCausalLM"]}
    return names | {"indexer_types": ["full"] * cfg.num_layers}


def _either(deepseek: Any, glm: Any) -> Callable[[Any], Any]:
    return lambda c: glm if c.is_glm else deepseek


def _read_rope(fields: HFConfig, c: Any) -> Rope:
    turned = fields.take("qk_rope_head_dim", kind=int)
    fields.require("head_dim", turned)
    fields.require("qk_head_dim", c.nope_dim + turned)
    return fields.rope(head_dim=turned, interleaved=True)


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    written = rope_to_hf(rope, head_dim=rope.dim, whole_heads=True, interleaved=True)
    return {"qk_rope_head_dim": rope.dim, **written}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a DeepSeek V3.2, or a GLM-5; `PRESETS` has the published ones."""

    model_types = (DEEPSEEK, GLM)
    architecture = "DeepseekV32ForCausalLM"
    fixed = {"hidden_act": "silu", "attention_bias": False}
    fixed_if_present = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    is_glm: bool = hf_fields(_read_kind, _write_kind, default=False)  # whose indexer rotates pairs instead of halves
    num_dense: int = hf_num_dense(absent=3)  # first layers, which have a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads", same=("num_key_value_heads",))
    q_rank: int = hf("q_lora_rank")
    kv_rank: int = hf("kv_lora_rank")
    nope_dim: int = hf("qk_nope_head_dim")
    v_dim: int = hf("v_head_dim")
    rope: Rope = hf_fields(_read_rope, _write_rope)
    index_heads: int = hf("index_n_heads", absent=_either(64, 32))  # of the indexer ...
    index_dim: int = hf("index_head_dim", absent=128)
    index_top: int = hf("index_topk", absent=2048)  # ... and how many keys it chooses
    num_experts: int = hf("n_routed_experts")
    num_shared: int = hf("n_shared_experts")
    top_k: int = hf("num_experts_per_tok")
    num_groups: int = hf("n_group", absent=_either(8, 1))
    top_groups: int = hf("topk_group", absent=_either(4, 1))
    renormalize: bool = hf("norm_topk_prob", True)
    routed_scale: float = hf("routed_scaling_factor", 2.5)
    norm_eps: float = hf("rms_norm_eps", 1e-6, absent=_either(1e-6, 1e-5))
    tied: bool = hf("tie_word_embeddings", False)
    losses: tuple[Any, ...] = ()  # what the routers report for training
    index_loss: nn.IndexLoss | None = None  # trains the indexers
    num_mtp: int = 0  # modules that look further ahead than the next token (`predict_ahead`) ...
    stored_mtp: int = hf_mtp(absent=0)  # ... of those that the checkpoint has

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not compute."""
        cfg = super().from_hf(fields)
        fields.layer_types(cfg.num_layers, SPARSE)  # every layer has an indexer
        return cfg

    @property
    def index_rope(self) -> Rope:
        """The rotation of index queries and keys: the same, in halves instead of pairs but for GLM."""
        return replace(self.rope, interleaved=self.is_glm)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.SparseMLA:
    # The cache keeps one latent [B, T, R] per token, R = 512 for all heads, a rotary key of 64 and an index key of 128.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    ranks: Any = dict(q_rank=cfg.q_rank, kv_rank=cfg.kv_rank, nope_dim=cfg.nope_dim, v_dim=cfg.v_dim)
    index: Any = dict(index_heads=cfg.index_heads, index_dim=cfg.index_dim, index_rope=cfg.index_rope)
    index |= dict(top_k=cfg.index_top, index_loss=cfg.index_loss)
    # The norms of the latents have the default epsilon, whatever `norm_eps`.
    own: Any = dict(num_heads=cfg.num_heads, rope=cfg.rope, scale=scale)
    return nn.SparseMLA(cfg.dim, **own, **ranks, **index, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Experts lie in groups, one per node; a token takes its k best of the best groups only, which bounds the traffic.
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Scores are sigmoids; a bias that counts for the choice only, not for the weights, evens the load.
    choice: Any = dict(score=jax.nn.sigmoid, renormalize=cfg.renormalize, scale=cfg.routed_scale, expert_bias=True)
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, groups=groups, **choice, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # every token takes it
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Block(nn.Layer):
    """Pre-norm layer of sparse latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache, loss = self.attn.with_loss(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux | loss


class DeepSeekV32(nn.Decoder):
    """DeepSeek V3.2: the cost of attention to a long text is that of its indexer, once kernels skip what is hidden."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), tuple({cfg.rope, cfg.index_rope})
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        module = lambda: nn.mtp.MTP(cfg.dim, block=Block(cfg, dense=False, rngs=rngs), eps=cfg.norm_eps, rngs=rngs)
        self.mtp = nnx.List([module() for _ in range(cfg.num_mtp)])


def _indexer() -> list[Weight]:
    """Lists the weights of the indexer."""
    hf_prefix, prefix = "self_attn.indexer", "attn.indexer"
    return [
        Weight(f"{hf_prefix}.wq_b.weight", f"{prefix}.q.w", "(N H) R -> N H R"),
        Weight(f"{hf_prefix}.wk.weight", f"{prefix}.k.w"),
        Weight(f"{hf_prefix}.k_norm.weight", f"{prefix}.k_norm.scale"),
        Weight(f"{hf_prefix}.k_norm.bias", f"{prefix}.k_norm.bias"),
        Weight(f"{hf_prefix}.weights_proj.weight", f"{prefix}.weight.w"),
    ]


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *_indexer(), *names.MLP, *names.MOE]
    modules = {"used": cfg.num_mtp, "stored": cfg.stored_mtp, "tied": cfg.tied}
    return [*names.decoder_table(layer), *names.mtp_table(layer, first=cfg.num_layers, **modules)]


# fmt: off
PRESETS = {
    "deepseek-v3.2": Config(
        vocab=129_280, num_layers=61, num_dense=3, dim=7168, mlp_dim=18_432, expert_dim=2048, num_heads=128,
        q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128,
        rope=Rope(64, 1e4, Yarn(40.0, 4096, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0), interleaved=True, max_length=163_840),
        index_heads=64, index_dim=128, index_top=2048, num_experts=256, num_shared=1, top_k=8, num_groups=8,
        top_groups=4, routed_scale=2.5,
    ),
}
# fmt: on

FAMILY = Family(name="deepseek_v32", model=DeepSeekV32, config=Config, table=_table, presets=PRESETS)
