"""Qwen3-Next (Qwen team 2025): three layers of gated DeltaNet, then one of gated attention; 512 small experts.

The multi-token prediction module is loaded only with `num_mtp=1`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, Table, Weight, hf, hf_layer_types, hf_rope, names

LINEAR, FULL = "linear_attention", "full_attention"


def _pattern(num_layers: int, period: int = 4) -> tuple[str, ...]:
    return tuple(LINEAR if (i + 1) % period else FULL for i in range(num_layers))


def _by_interval(fields: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := fields.take("full_attention_interval", 4)) < 1:
        raise ValueError(f"{fields.where('full_attention_interval')} must be at least 1, got {period}.")
    return _pattern(c.num_layers, period)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Qwen3-Next; `PRESETS` has the published ones."""

    model_types = ("qwen3_next",)
    architecture = "Qwen3NextForCausalLM"
    fixed = {"hidden_act": "silu"}
    fixed_if_present = {"use_sliding_window": False}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")  # of layers without experts
    expert_dim: int = hf("moe_intermediate_size", absent=512)
    shared_dim: int = hf("shared_expert_intermediate_size", absent=512)
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=256)
    rope: Rope = hf_rope(partial=True, default_fraction=0.25)
    num_key_heads: int = hf("linear_num_key_heads", absent=16)  # of linear attention ...
    num_value_heads: int = hf("linear_num_value_heads", absent=32)
    key_dim: int = hf("linear_key_head_dim", absent=128)
    value_dim: int = hf("linear_value_head_dim", absent=128)
    conv_width: int = hf("linear_conv_kernel_dim", 4)  # ... and of the convolution before it
    # LINEAR or FULL for each layer; None: every fourth is FULL.
    layer_types: tuple[str, ...] | None = hf_layer_types(
        LINEAR, FULL, usual=lambda c: _pattern(c.num_layers), absent=_by_interval
    )
    num_experts: int = hf("num_experts", absent=512)
    top_k: int = hf("num_experts_per_tok", absent=10)
    renormalize: bool = hf("norm_topk_prob", True)  # the weights of a token's experts sum to one
    sparse_step: int = hf("decoder_sparse_step", 1)  # every `sparse_step`-th layer has experts, ...
    dense_layers: tuple[int, ...] = hf("mlp_only_layers", ())  # ... except these
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", False)
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    num_mtp: int = 0  # 1: with the multi-token prediction module (`predict_ahead`)

    def __post_init__(self):
        super().__post_init__()
        if self.num_mtp not in (0, 1):
            raise ValueError(f"num_mtp must be 0 or 1, the one module of the releases, got {self.num_mtp}")

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """LINEAR or FULL for each layer, and whether it has experts."""
        every, dense = self.sparse_step, self.dense_layers
        sparse = ((i + 1) % every == 0 and i not in dense and self.num_experts > 0 for i in range(self.num_layers))
        return tuple(zip(self.layer_types or _pattern(self.num_layers), sparse, strict=True))

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json."""
        # A missing field means a quarter, and `hf_rope` writes none for a rope over whole heads.
        return {"partial_rotary_factor": 1.0} | super().to_hf()


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
    norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True)  # one scale [H] for all heads
    options: Any = dict(bias=cfg.attention_bias, out_bias=cfg.attention_bias, q_norm=norm(), k_norm=norm())
    # The rope rotates the first quarter of each head; the output gate has one value per head and dimension.
    return nn.Attention(cfg.dim, **heads, rope=cfg.rope, out_gate_act=jax.nn.sigmoid, **options, rngs=rngs)


def _delta_net(cfg: Config, *, rngs: nnx.Rngs) -> nn.GatedDeltaNet:
    heads: Any = dict(num_heads=cfg.num_value_heads, num_key_heads=cfg.num_key_heads)
    widths: Any = dict(key_dim=cfg.key_dim, value_dim=cfg.value_dim, conv_width=cfg.conv_width)
    return nn.GatedDeltaNet(cfg.dim, **heads, **widths, norm_eps=cfg.norm_eps, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts; each token uses the best k (10 of 512) and the shared expert, scaled by its own gate.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.shared_dim, rngs=rngs)
    own: Any = dict(router=router, shared=shared, shared_gate=True, losses=cfg.losses)
    return nn.MoE(cfg.dim, cfg.expert_dim, **own, rngs=rngs)


class Block(nn.Layer):
    """Mixes tokens by linear attention or attention, then passes each through experts or an MLP."""

    def __init__(self, cfg: Config, kind: str, sparse: bool, *, rngs: nnx.Rngs):
        norm = lambda: nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm()
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = _delta_net(cfg, rngs=rngs) if kind == LINEAR else None
        self.mlp_norm = norm()
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = (self.attn or self.delta)(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty cache: keys and values, or a state."""
        return (self.attn or self.delta).init_cache(batch, capacity, dtype)


class Qwen3Next(nn.Decoder):
    """Qwen3-Next: every fourth layer caches keys and values, the others a state of fixed size."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        block = lambda: Block(cfg, FULL, cfg.num_experts > 0, rngs=rngs)
        ahead = lambda: nn.mtp.MTP(cfg.dim, block=block(), eps=cfg.norm_eps, plus_one=True, rngs=rngs)
        self.mtp = nnx.List([ahead() for _ in range(cfg.num_mtp)])


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
    heads = {"keys": (cfg.num_key_heads, key), "values": (cfg.num_value_heads, value)}
    return [*table, *names.queries_keys_values(*names.CONV1D, **heads), *names.LINEAR_ATTENTION]


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

FAMILY = Family(name="qwen3_next", model=Qwen3Next, config=Config, table=_table, presets=PRESETS)
