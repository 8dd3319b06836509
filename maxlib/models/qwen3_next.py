"""Qwen3-Next (Qwen team 2025): three layers of gated DeltaNet, then one of gated attention; 512 small experts."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, HFConfig, Table, Weight, fields, names

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Qwen3-Next; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int  # of layers without experts
    expert_dim: int
    shared_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    num_key_heads: int  # of linear attention ...
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4  # ... and of the convolution before it
    layer_types: tuple[str, ...] | None = None  # LINEAR or FULL for each layer; None: every fourth is FULL
    num_experts: int
    top_k: int
    renormalize: bool = True  # the weights of a token's experts sum to one
    sparse_step: int = 1  # every `sparse_step`-th layer has experts, ...
    dense_layers: tuple[int, ...] = ()  # ... except these
    norm_eps: float = 1e-6
    tied: bool = False
    attention_bias: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    num_mtp: int = 0  # 1: the multi-token prediction module (`predict_ahead`) is loaded

    def __post_init__(self):
        _check(self)

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """LINEAR or FULL for each layer, and whether it has experts."""
        return tuple(zip(self.layer_types or _pattern(self.num_layers), _sparse(self), strict=True))


class Block(nn.Layer):
    """Mixes tokens by linear attention or attention, then passes each through experts or an MLP."""

    def __init__(self, cfg: Config, kind: str, sparse: bool, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = _delta_net(cfg, rngs=rngs) if kind == LINEAR else None
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = (self.attn or self.delta)(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return nn.residual(x, h, "mlp"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty cache: keys and values, or a state."""
        return (self.attn or self.delta).init_cache(batch, capacity, dtype)


def _check(cfg: Config) -> None:
    fields.check_layer_types(cfg)
    if cfg.num_mtp not in (0, 1):
        raise ValueError(f"num_mtp must be 0 or 1, the one module of the releases, got {cfg.num_mtp}")


def _sparse(cfg: Config) -> list[bool]:
    every, dense = cfg.sparse_step, cfg.dense_layers
    return [(i + 1) % every == 0 and i not in dense and cfg.num_experts > 0 for i in range(cfg.num_layers)]


def _pattern(num_layers: int, period: int = 4) -> tuple[str, ...]:
    return tuple(LINEAR if (i + 1) % period else FULL for i in range(num_layers))


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    # The rope rotates the first quarter of each head; the output gate has one value per head and dimension.
    return nn.Attention(
        cfg.dim,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        rope=cfg.rope,
        out_gate_act=jax.nn.sigmoid,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        q_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True),
        k_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True),
        rngs=rngs,
    )


def _delta_net(cfg: Config, *, rngs: nnx.Rngs) -> nn.GatedDeltaNet:
    return nn.GatedDeltaNet(
        cfg.dim,
        num_heads=cfg.num_value_heads,
        num_key_heads=cfg.num_key_heads,
        key_dim=cfg.key_dim,
        value_dim=cfg.value_dim,
        conv_width=cfg.conv_width,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts; each token uses the best k (10 of 512) and the shared expert, scaled by its own gate.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.shared_dim, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, shared_gate=True, losses=cfg.losses, rngs=rngs)


class Qwen3Next(nn.Decoder):
    """Qwen3-Next: every fourth layer caches keys and values, the others a state of fixed size."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        blocks = [Block(cfg, FULL, cfg.num_experts > 0, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List(
            [nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, plus_one=True, rngs=rngs) for block in blocks]
        )


def _by_interval(hf: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := hf.take("full_attention_interval", 4)) < 1:
        raise ValueError(f"{hf.where('full_attention_interval')} must be at least 1, got {period}.")
    return _pattern(c.num_layers, period)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.EXPERTS,
        Field("shared_dim", "shared_expert_intermediate_size"),
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.25),
        *fields.LINEAR_ATTENTION,
        fields.layer_types(LINEAR, FULL, usual=lambda c: _pattern(c.num_layers), absent=_by_interval),
        Field("renormalize", "norm_topk_prob"),
        Field("sparse_step", "decoder_sparse_step"),
        Field("dense_layers", "mlp_only_layers"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"qwen3_next": "Qwen3NextForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"use_sliding_window": False},
    absent={
        "expert_dim": 512,
        "shared_dim": 512,
        "head_dim": 256,
        "num_key_heads": 16,
        "num_value_heads": 32,
        "key_dim": 128,
        "value_dim": 128,
        "num_experts": 512,
        "top_k": 10,
    },
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
