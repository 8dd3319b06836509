"""Granite 4 (IBM 2025), hybrid and dense: nine layers of Mamba-2 for each one of attention, experts and a shared
MLP.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _sizes as sizes
from maxlib.models._layers import PreNorm, ScaledDecoder, attention, mamba2
from maxlib.models._sizes import AttentionSizes, MambaSizes, mamba_heads
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names

MAMBA, FULL = "mamba", "attention"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, MambaSizes):
    """Sizes of a Granite 4; `PRESETS` has the published ones. Dense models have neither experts nor Mamba."""

    expert_dim: int
    shared_dim: int  # of the MLP that every token passes
    num_experts: int = 0
    top_k: int = 0
    # Whether attention is rotated: hybrids have no positions but those that Mamba brings.
    rotated: bool = False
    layer_types: tuple[str, ...]
    mamba_expand: int = 2  # width of all heads of Mamba together, in widths of the model
    mamba_heads: int = 1
    mamba_state: int = 128
    embed_factor: float = 1.0
    score_factor: float = 1.0  # in place of head_dim ** -0.5
    residual_factor: float = 1.0
    logit_divisor: float = 1.0
    norm_eps: float = 1e-5
    attention_bias: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`

    def __post_init__(self):
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}")
        if MAMBA in self.layer_types and self.mamba_expand * self.dim % self.mamba_heads:
            raise ValueError(
                f"mamba_heads must divide mamba_expand * dim = {self.mamba_expand * self.dim}, got {self.mamba_heads}"
            )


class Block(PreNorm):
    """Mixes tokens by Mamba-2 or attention, then passes each through an MLP and experts; branches are scaled."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        width = cfg.mamba_expand * D // cfg.mamba_heads
        self.mamba: Any = mamba2(D, cfg, head_dim=width, norm_eps=cfg.norm_eps, rngs=rngs) if kind == MAMBA else None
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        mlp = nn.GatedMLP(D, cfg.shared_dim, rngs=rngs)
        self.mlp: Any = None if cfg.num_experts else mlp
        self.moe: Any = _experts(cfg, mlp, rngs=rngs) if cfg.num_experts else None
        self.factor = cfg.residual_factor


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    return attention(
        cfg,
        rope=cfg.rope if cfg.rotated else None,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        scale=cfg.score_factor,
        rngs=rngs,
    )


def _experts(cfg: Config, shared: nn.GatedMLP, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over the logits of the chosen experts. The shared MLP is applied to all tokens.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Granite4(ScaledDecoder):
    """Granite 4: Mamba-2 in most layers, attention in a few; four factors control the size of activations and
    logits.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.layer_types, rngs=rngs)


def _read_rotated(hf: HFConfig, c: Any) -> bool:
    return hf.require("position_embedding_type", "nope", "rope", None) == "rope"


# transformers 5 calls them otherwise.
SPELLINGS = {MAMBA: MAMBA, FULL: FULL, "linear_attention": MAMBA, "full_attention": FULL}


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...]:
    # Left out, all layers are Mambas.
    types = hf.layer_types(c.num_layers, *SPELLINGS) or (MAMBA,) * c.num_layers
    return tuple(SPELLINGS[kind] for kind in types)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        Field("shared_dim", "shared_intermediate_size"),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
        *fields.ATTENTION,
        fields.rope(default_length=2048),
        Computed("rotated", _read_rotated, lambda on, cfg: {"position_embedding_type": "rope" if on else "nope"}),
        Computed("layer_types", _read_types, lambda types, cfg: {"layer_types": list(types)}),
        Field("mamba_expand"),
        mamba_heads(lambda c: c.mamba_expand * c.dim),
        *sizes.MAMBA,
        *fields.MULTIPLIERS,
        fields.ATTENTION_BIAS,
    ],
    model_types={"granitemoehybrid": "GraniteMoeHybridForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"normalization_function": "rmsnorm"},
    absent={
        "shared_dim": 1024,
        "num_experts": 8,
        "top_k": 2,
        "num_kv_heads": fields.num_heads,
        "head_dim": fields.equal_heads,
        "mamba_state": 256,
        "norm_eps": 1e-6,
    },
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (one of both mixers, experts) is passed over.
    shared, experts, path = "shared_mlp.input_linear.weight", "block_sparse_moe.input_linear.weight", "mlp"
    if cfg.num_experts:
        path = "moe.shared"
    layer = [*names.NORMS, *names.ATTENTION, Weight("shared_mlp.output_linear.weight", f"{path}.down.w")]
    for row, part in enumerate(("gate", "up")):  # gate over up
        layer += [
            Weight(shared, f"{path}.{part}.w", "(two F) D -> F D", {"two": row}),
            Weight(experts, f"moe.{part}.w", "E (two F) D -> E F D", {"two": row}),
        ]
    layer += [Weight("block_sparse_moe.output_linear.weight", "moe.down.w")]
    layer += [Weight("block_sparse_moe.router.layer.weight", "moe.router.gate.w")]
    inner, groups = cfg.mamba_expand * cfg.dim, cfg.mamba_groups * cfg.mamba_state
    return names.decoder_table(
        [*layer, *names.mamba2("mamba", "mamba", heads=cfg.mamba_heads, inner=inner, groups=groups)]
    )


def _hybrid(num_layers: int, *full: int) -> tuple[str, ...]:
    return tuple(FULL if i in full else MAMBA for i in range(num_layers))


# fmt: off
_MICRO = Config(
    vocab=100_352, num_layers=40, dim=2560, expert_dim=8192, shared_dim=8192, num_heads=40, num_kv_heads=8, head_dim=64,
    rope=Rope(64, 10_000_000.0, max_length=131_072), rotated=True, layer_types=(FULL,) * 40, embed_factor=12.0,
    score_factor=0.015625, residual_factor=0.22, logit_divisor=10.0, tied=True,
)
# Hybrids: heads of Mamba are 64 wide, but for the smallest model.
_H_MICRO = replace(
    _MICRO, dim=2048, num_heads=32, rope=Rope(64, 10_000.0, max_length=131_072), rotated=False,
    layer_types=_hybrid(40, 5, 15, 25, 35), mamba_heads=64, logit_divisor=8.0,
)
_H_1B = replace(
    _H_MICRO, dim=1536, expert_dim=4096, shared_dim=4096, num_heads=12, num_kv_heads=4, head_dim=128,
    rope=Rope(128, 10_000.0, max_length=131_072), mamba_heads=48, score_factor=0.0078125, logit_divisor=6.0,
)
PRESETS = {
    "granite-4.0-1b": replace(
        _MICRO, dim=2048, expert_dim=4096, shared_dim=4096, num_heads=16, num_kv_heads=4, head_dim=128,
        rope=replace(_MICRO.rope, dim=128), score_factor=0.0078125, logit_divisor=8.0,
    ),
    "granite-4.0-micro": _MICRO,
    "granite-4.0-h-350m": replace(
        _H_1B, num_layers=32, dim=768, expert_dim=2048, shared_dim=2048, head_dim=64,
        rope=Rope(64, 10_000.0, max_length=32_768), layer_types=_hybrid(32, 10, 13, 17, 27), score_factor=0.015625,
        residual_factor=0.246, logit_divisor=3.0,
    ),
    "granite-4.0-h-1b": _H_1B,
    "granite-4.0-h-micro": _H_MICRO,
    "granite-4.0-h-tiny": replace(_H_1B, expert_dim=512, shared_dim=1024, num_experts=64, top_k=6),
    "granite-4.0-h-small": replace(
        _H_1B, dim=4096, expert_dim=768, shared_dim=1536, num_heads=32, num_kv_heads=8, mamba_heads=128,
        num_experts=72, top_k=10, logit_divisor=16.0,
    ),
}
# fmt: on

FAMILY = Family("granite4", Granite4, FIELDS, _table, PRESETS)
