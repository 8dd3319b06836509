"""Qwen3, mixture of experts: Qwen3's attention, and many small experts instead of an MLP (arXiv:2505.09388)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, names, rope_to_hf

# Our sizes, and what config.json calls them.
_SIZES = {
    "vocab": "vocab_size",
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "expert_dim": "moe_intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Qwen3 from another; `PRESETS` has the published ones.

    sparse_step: every how many layers one has experts; those in `dense_layers` never do. All others have an MLP of
    width `mlp_dim`. renormalize: whether the weights of a token's experts sum to one. window: of all layers; None sees
    everything. losses: what the routers report for training, `nn.SwitchBalance(0.001)` say.
    """

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    num_experts: int
    top_k: int
    renormalize: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    window: int | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    attention_bias: bool = False
    losses: tuple[Any, ...] = ()

    @property
    def mask(self) -> ops.Mask:
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        every, dense = self.sparse_step, self.dense_layers
        return tuple((i + 1) % every == 0 and i not in dense for i in range(self.num_layers))

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "qwen3_moe")
        fields.require("hidden_act", "silu")
        fields.require("use_qk_norm", True)
        fields.require("qkv_bias", False)
        fields.require("shared_expert_intermediate_size", 0)
        sizes = {ours: fields.take(theirs, kind=int) for ours, theirs in _SIZES.items()}
        head_dim = fields.take("head_dim", sizes["dim"] // sizes["num_heads"])
        return cls(
            **sizes,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            num_experts=_read_num_experts(fields),
            renormalize=fields.take("norm_topk_prob", False),
            sparse_step=fields.take("decoder_sparse_step", 1),
            dense_layers=tuple(fields.take("mlp_only_layers", (), kind=list)),
            window=_read_window(fields),
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", False),
            attention_bias=fields.take("attention_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Qwen3 does not have."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **{theirs: getattr(self, ours) for ours, theirs in _SIZES.items()},
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "norm_topk_prob": self.renormalize,
            "decoder_sparse_step": self.sparse_step,
            "mlp_only_layers": list(self.dense_layers),
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "use_sliding_window": self.window is not None,
            "sliding_window": self.window,
            "max_window_layers": 0,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


def _read_num_experts(fields: HFConfig) -> int:
    """Called `num_experts` by transformers 4, `num_local_experts` by 5."""
    local = fields.take("num_local_experts", None, kind=int)
    return fields.take("num_experts", 128) if local is None else fields.require("num_experts", local)


def _read_window(fields: HFConfig) -> int | None:
    window = fields.take("sliding_window", 4096, nullable=True)
    if not fields.take("use_sliding_window", False) or window is None:
        fields.ignore("max_window_layers")
        return None
    fields.require("max_window_layers", 0)  # transformers 4 and 5 disagree on what else would mean
    return window


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, sparse: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=cfg.mask,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            q_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps),
            k_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps),
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Qwen3MoE(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (cfg.mask,), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        sparse = cfg.sparse
        make = lambda i, rngs: Block(cfg, sparse=sparse[i], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(sparse), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights. What a layer does not have (experts or an MLP) is passed over."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE])


_30B = Config(
    vocab=151_936,
    num_layers=48,
    dim=2048,
    mlp_dim=6144,
    expert_dim=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=40_960),
    num_experts=128,
    top_k=8,
)
_235B = dataclasses.replace(_30B, num_layers=94, dim=4096, mlp_dim=12_288, expert_dim=1536, num_heads=64)
_480B = dataclasses.replace(
    _30B,
    num_layers=62,
    dim=6144,
    mlp_dim=8192,
    expert_dim=2560,
    num_heads=96,
    num_kv_heads=8,
    rope=Rope(128, 10_000_000.0, max_length=262_144),
    num_experts=160,
)
PRESETS = {
    "qwen3-30b-a3b": _30B,
    "qwen3-30b-a3b-2507": dataclasses.replace(_30B, rope=Rope(128, 10_000_000.0, max_length=262_144)),
    "qwen3-235b-a22b": _235B,
    "qwen3-235b-a22b-2507": dataclasses.replace(_235B, rope=Rope(128, 5_000_000.0, max_length=262_144)),
    "qwen3-coder-480b-a35b": _480B,
}

FAMILY = Family(
    name="qwen3_moe", model_types=("qwen3_moe",), model=Qwen3MoE, config=Config, table=_table, presets=PRESETS
)
