"""LFM2 (Liquid AI 2025, arXiv:2511.23404), dense and with experts: gated short convolutions between attention."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names

CONV, FULL = "conv", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an LFM2; `PRESETS` has the published ones."""

    vocab: int = 65_536
    num_experts: int | None = None
    num_dense: int | None = None  # number of first layers with a plain MLP
    expert_dim: int | None = None
    top_k: int | None = None
    expert_bias: bool | None = None  # evens the load
    renormalize: bool | None = None  # the weights of a token's experts sum to one
    routed_scale: float | None = None
    mlp_dim: int
    # CONV or FULL for each layer; None: all are FULL.
    layer_types: tuple[str, ...] | None = None
    conv_width: int = 3
    conv_bias: bool = False
    norm_eps: float = 1e-5
    tied: bool = True
    losses: tuple[Any, ...] = ()  # router losses for training

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """CONV or FULL for each layer, and whether it has experts."""
        dense = self.num_layers if self.num_dense is None else self.num_dense
        types = self.layer_types or (FULL,) * self.num_layers
        return tuple((kind, i >= dense) for i, kind in enumerate(types))


class Block(PreNorm):
    """Mixes tokens by a short convolution or attention, then passes each through an MLP or experts."""

    def __init__(self, cfg: Config, kind: str, sparse: bool, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn: Any = attention(cfg, rope=cfg.rope, qk_norm=True, rngs=rngs) if kind == FULL else None
        self.conv: Any = (
            nn.ShortConvolution(cfg.dim, conv_width=cfg.conv_width, bias=cfg.conv_bias, rngs=rngs)
            if kind == CONV
            else None
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    # Scores are sigmoids; the bias counts for the choice only, not for the weights.
    router = nn.Router(
        cfg.dim,
        num_experts=cfg.num_experts,
        top_k=cfg.top_k,
        expert_bias=cfg.expert_bias,
        score=jax.nn.sigmoid,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        rngs=rngs,
    )
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class LFM2(TextDecoder):
    """LFM2: two of three layers are short convolutions, which only cache the last two tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)


DENSE, SPARSE = "lfm2", "lfm2_moe"


def _of_experts(name: str, hf_name: str, absent: Any) -> Computed:
    return fields.only_if(lambda c: c.model_type == SPARSE, name, hf_name, absent)


def _read_mlp_dim(hf: HFConfig, c: Any) -> int:
    width = hf.take("intermediate_size", 7168 if c.num_experts is not None else 12_288)
    if c.num_experts is not None:
        return width
    width = hf.take("block_ff_dim", width)  # files may say both
    factor = hf.take("block_ffn_dim_multiplier", 1.0, nullable=True)
    multiple = hf.take("block_multiple_of", 256)
    if not hf.take("block_auto_adjust_ff_dim", True):
        return width
    # Two thirds, since a gated MLP has three matrices in place of two; rounded up.
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _write_mlp_dim(width: int, cfg: Any) -> dict[str, Any]:
    return {"intermediate_size": width} | ({"block_auto_adjust_ff_dim": False} if cfg.num_experts is None else {})


def _by_index(hf: HFConfig, c: Any) -> tuple[str, ...]:
    """Returns the layers of a config.json without `layer_types`: those that `full_attn_idxs` lists attend."""
    full = hf.take("full_attn_idxs", None, kind=list)
    if full is None and c.num_experts is not None and "layer_types" not in hf:
        raise ValueError(f"{hf.where('layer_types')} must be given: {CONV!r} or {FULL!r} for each layer.")
    return tuple(FULL if full is None or i in full else CONV for i in range(c.num_layers))


def _read_tied(hf: HFConfig, c: Any) -> bool:
    return hf.take("tie_embedding", hf.take("tie_word_embeddings", True))  # the releases' name, then the usual


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("dim", "hidden_size"),
        _of_experts("num_experts", "num_experts", 32),
        _of_experts("num_dense", "num_dense_layers", 2),
        _of_experts("expert_dim", "moe_intermediate_size", 1792),
        _of_experts("top_k", "num_experts_per_tok", 4),
        _of_experts("expert_bias", "use_expert_bias", True),
        _of_experts("renormalize", "norm_topk_prob", True),
        _of_experts("routed_scale", "routed_scaling_factor", 1.0),
        Computed("mlp_dim", _read_mlp_dim, _write_mlp_dim),
        *fields.ATTENTION,
        fields.rope(default_theta=1_000_000.0, default_length=128_000),
        fields.layer_types(CONV, FULL, usual=lambda c: (FULL,) * c.num_layers, absent=_by_index),
        Field("conv_width", "conv_L_cache"),
        Field("conv_bias"),
        Field("norm_eps"),
        Computed("tied", _read_tied, lambda value, cfg: {"tie_word_embeddings": value}),
    ],
    model_types={DENSE: "Lfm2ForCausalLM", SPARSE: "Lfm2MoeForCausalLM"},
    model_type=lambda cfg: DENSE if cfg.num_experts is None else SPARSE,
    fixed_if_present={"block_use_swiglu": True, "use_pos_enc": True},
    # Said twice in the releases (transformers reads none of them), and of initialisation.
    ignored=(
        *("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads", "theta"),
        *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    ),
    absent={"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (one of both mixers, experts or an MLP) is passed over.
    layer = [
        *names.norms(attn_norm="operator_norm", mlp_norm="ffn_norm"),
        *names.attention("self_attn.{}_proj", "attn", out="self_attn.out_proj"),
        Weight("self_attn.q_layernorm.weight", "attn.q_norm.scale"),
        Weight("self_attn.k_layernorm.weight", "attn.k_norm.scale"),
    ]
    for row, part in enumerate(("in_gate", "out_gate", "value")):
        layer += [
            Weight("conv.in_proj.weight", f"conv.{part}.w", "(R F) D -> F D", {"R": row}),
            Weight("conv.in_proj.bias", f"conv.{part}.b", "(R F) -> F", {"R": row}),
        ]
    layer += [Weight("conv.conv.weight", "conv.conv", "D one W -> D W", {"one": 0})]
    layer += [Weight("conv.conv.bias", "conv.conv_bias"), *names.linear("conv.out_proj", "conv.o")]
    # w1, w3 and w2 are gate, up and down.
    for hf_name, part in {"w1": "gate", "w3": "up", "w2": "down"}.items():
        layer.append(Weight(f"feed_forward.{hf_name}.weight", f"mlp.{part}.w"))
    layer += names.experts("feed_forward.experts.{e}.{}", ("w1", "w3", "w2"))
    layer += [Weight("feed_forward.gate.weight", "moe.router.gate.w")]
    layer += [Weight("feed_forward.expert_bias", "moe.router.expert_bias")]
    return names.decoder_table(layer, norm="embedding_norm")


# fmt: off
_350M = Config(
    num_layers=16, dim=1024, mlp_dim=4608, num_heads=16, num_kv_heads=8, head_dim=64,
    rope=Rope(64, 1_000_000.0, max_length=128_000),
    layer_types=tuple(FULL if i in (2, 5, 8, 10, 12, 14) else CONV for i in range(16)),
)
_8B = replace(
    _350M, num_layers=24, dim=2048, mlp_dim=7168, num_heads=32, num_experts=32, num_dense=2, expert_dim=1792, top_k=4,
    expert_bias=True, renormalize=True, routed_scale=1.0,
    layer_types=tuple(FULL if i in (2, 6, 10, 14, 18, 21) else CONV for i in range(24)),
)
PRESETS = {
    "lfm2-350m": _350M,
    "lfm2-700m": replace(_350M, dim=1536, mlp_dim=6912, num_heads=24),
    "lfm2-1.2b": replace(_350M, dim=2048, mlp_dim=8192, num_heads=32),
    "lfm2-8b-a1b": _8B,
    "lfm2.5-8b-a1b": replace(_8B, vocab=128_000, rope=Rope(64, 5_000_000.0, max_length=128_000)),
}
# fmt: on

FAMILY = Family("lfm2", LFM2, FIELDS, _table, PRESETS)
