"""Qwen3-Next (Qwen team 2025): three layers of gated DeltaNet, then one of gated attention; 512 small experts."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention, delta_net, gated_shared_experts
from maxlib.models._sizes import DECODER, MIXED, DeltaSizes, MixedSizes, by_interval, every
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, Weight, fields, names

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(MixedSizes, DeltaSizes):
    """Sizes of a Qwen3-Next; `PRESETS` has the published ones."""

    shared_dim: int
    layer_types: tuple[str, ...] | None = None  # LINEAR or FULL for each layer; None: every fourth is FULL
    attention_bias: bool = False
    num_mtp: int = 0  # 1: the multi-token prediction module (`predict_ahead`) is loaded

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.num_mtp not in (0, 1):
            raise ValueError(f"num_mtp must be 0 or 1, the one module of the releases, got {self.num_mtp}")

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """LINEAR or FULL for each layer, and whether it has experts."""
        return tuple(zip(self.layer_types or _usual_types(self), self.sparse, strict=True))


class Block(PreNorm):
    """Mixes tokens by linear attention or attention, then passes each through experts or an MLP."""

    def __init__(self, cfg: Config, kind: str, sparse: bool, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = delta_net(cfg, norm_eps=cfg.norm_eps, rngs=rngs) if kind == LINEAR else None
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        # The best k (10 of 512) of all experts, and the shared one.
        self.moe: Any = gated_shared_experts(cfg, rngs=rngs) if sparse else None


def _usual_types(c: Any) -> tuple[str, ...]:
    return every(4, c.num_layers, LINEAR, FULL)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    # The rope rotates the first quarter of each head; the output gate has one value per head and dimension.
    return attention(
        cfg,
        rope=cfg.rope,
        qk_norm=True,
        plus_one=True,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        out_gate_act=jax.nn.sigmoid,
        rngs=rngs,
    )


class Qwen3Next(TextDecoder):
    """Qwen3-Next: every fourth layer caches keys and values, the others a state of fixed size."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, plus_one=True, rngs=rngs)
        blocks = [Block(cfg, FULL, cfg.num_experts > 0, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List(
            [nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, plus_one=True, rngs=rngs) for block in blocks]
        )


FIELDS = Fields(
    Config,
    [
        *DECODER,
        *fields.EXPERTS,
        Field("shared_dim", "shared_expert_intermediate_size"),
        fields.rope(partial=True, default_fraction=0.25),
        *fields.LINEAR_ATTENTION,
        fields.layer_types(LINEAR, FULL, usual=_usual_types, absent=by_interval(LINEAR, FULL)),
        *MIXED,
        fields.ATTENTION_BIAS,
    ],
    model_types={"qwen3_next": "Qwen3NextForCausalLM"},
    fixed={"hidden_act": "silu"},
)


def _linear_attention(cfg: Config) -> list[Weight]:
    """Lists the projections. Files store them per key head: its query, its key, then its values, gates and rates."""
    qkvz, ba, rows = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight", "(K R) D -> K R D"
    key, value, shared = cfg.key_dim, cfg.value_dim, cfg.num_value_heads // cfg.num_key_heads
    table = [Weight(qkvz, "delta.q.w", rows, {"R": 0}), Weight(qkvz, "delta.k.w", rows, {"R": key})]
    for n in range(cfg.num_value_heads):
        group, i = divmod(n, shared)
        for part, first in (("v", i), ("gate", shared + i)):
            at = {"K": group, "R": 2 * key + first * value}
            table.append(Weight(qkvz, f"delta.{part}.w", "(K R) D -> N R D", at, {"N": n}))
        for part, row in (("b", i), ("a", shared + i)):
            table.append(Weight(ba, f"delta.{part}.w", "(K R) D -> N D", {"K": group, "R": row}, {"N": n}))
    keys, values = (cfg.num_key_heads, key), (cfg.num_value_heads, value)
    return [
        *table,
        *names.queries_keys_values(*names.CONV1D, keys=keys, values=values),
        *names.LINEAR_ATTENTION,
    ]


def _table(cfg: Config) -> Table:
    # Entries for parts that a layer lacks (attention or DeltaNet, experts or an MLP) are ignored.
    layer = [*names.NORMS, *names.gated_attention(cfg.head_dim), *_linear_attention(cfg)]
    layer += [*names.MLP, *names.EXPERTS, *names.GATED_SHARED_EXPERT]
    return [*names.decoder_table(layer), *names.fused_experts("model"), *names.qwen_mtp_table(layer, used=cfg.num_mtp)]


# fmt: off
PRESETS = {
    "qwen3-next-80b-a3b": Config(
        vocab=151_936, num_layers=48, dim=2048, mlp_dim=5120, expert_dim=512, shared_dim=512, num_heads=16,
        num_kv_heads=2, head_dim=256, rope=Rope(64, 10_000_000.0, max_length=262_144), num_key_heads=16,
        num_value_heads=32, key_dim=128, value_dim=128, num_experts=512, top_k=10,
    ),
}
# fmt: on

FAMILY = Family("qwen3_next", Qwen3Next, FIELDS, _table, PRESETS)
