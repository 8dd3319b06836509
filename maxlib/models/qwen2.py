"""Qwen2 and Qwen2.5: Llama's block with biases on queries, keys and values (Qwen team 2024)."""

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

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Qwen2 from another; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None  # of the sliding layers
    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING each; None: all FULL
    norm_eps: float = 1e-6
    tied: bool = False

    def __post_init__(self):
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}")
        if SLIDING in (self.layer_types or ()) and self.window is None:
            raise ValueError(
                f"layer_types has {SLIDING}, which needs a window (config.json: use_sliding_window and sliding_window)"
            )

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """What each layer sees."""
        if self.layer_types is None or self.window is None:
            return (ops.Causal(),) * self.num_layers
        masks = {FULL: ops.Causal(), SLIDING: ops.Causal() & ops.SlidingWindow(self.window)}
        return tuple(masks[kind] for kind in self.layer_types)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "qwen2")
        fields.require("hidden_act", "silu")
        fields.require("use_mrope", False)
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        num_layers = fields.take("num_hidden_layers", kind=int)
        window = fields.take("sliding_window", 4096, nullable=True)
        window = window if fields.take("use_sliding_window", False) else None
        full = fields.take("max_window_layers", 28)
        types = fields.layer_types(num_layers, FULL, SLIDING)
        types = types or tuple(FULL if window is None or i < full else SLIDING for i in range(num_layers))
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=num_layers,
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", kind=int, nullable=True) or num_heads,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim),
            window=window if SLIDING in types else None,
            layer_types=types if SLIDING in types else None,
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Qwen2 does not have."""
        types = self.layer_types or (FULL,) * self.num_layers
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "use_sliding_window": SLIDING in types,
            "sliding_window": self.window,
            "max_window_layers": types.count(FULL),  # all that early versions of transformers look at
            "layer_types": list(types),
            "tie_word_embeddings": self.tied,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


class Block(nnx.Module):
    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            bias=True,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Qwen2(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        masks = cfg.masks
        make = lambda i, rngs: Block(cfg, masks[i], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(masks), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


_7B = Config(
    vocab=152_064,
    num_layers=28,
    dim=3584,
    mlp_dim=18_944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=131_072),
)
_0_5B = dict(vocab=151_936, num_layers=24, dim=896, mlp_dim=4864, num_heads=14, num_kv_heads=2, head_dim=64, tied=True)
_1_5B = dict(vocab=151_936, num_layers=28, dim=1536, mlp_dim=8960, num_heads=12, num_kv_heads=2, tied=True)
# The instruction-tuned 14B and larger have a norm_eps of 1e-6.
_72B = dict(num_layers=80, dim=8192, mlp_dim=29_568, num_heads=64, num_kv_heads=8, norm_eps=1e-5)


def _sized(length: int, **changes) -> Config:
    """A Qwen2 of another size, for contexts of `length`."""
    changed = dataclasses.replace(_7B, **changes)
    return dataclasses.replace(changed, rope=Rope(changed.head_dim, 1_000_000.0, max_length=length))


PRESETS = {
    "qwen2-0.5b": _sized(131_072, **_0_5B),
    "qwen2-1.5b": _sized(131_072, **_1_5B),
    "qwen2-7b": _7B,
    "qwen2-72b": _sized(131_072, **_72B),
    "qwen2.5-0.5b": _sized(32_768, **_0_5B),
    "qwen2.5-1.5b": _sized(131_072, **_1_5B),
    "qwen2.5-3b": _sized(
        32_768, vocab=151_936, num_layers=36, dim=2048, mlp_dim=11_008, num_heads=16, num_kv_heads=2, tied=True
    ),
    "qwen2.5-7b": _7B,
    "qwen2.5-14b": _sized(
        131_072, num_layers=48, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=8, norm_eps=1e-5
    ),
    "qwen2.5-32b": _sized(
        131_072, num_layers=64, dim=5120, mlp_dim=27_648, num_heads=40, num_kv_heads=8, norm_eps=1e-5
    ),
    "qwen2.5-72b": _sized(131_072, **_72B),
}

FAMILY = Family(name="qwen2", model_types=("qwen2",), model=Qwen2, config=Config, table=_table, presets=PRESETS)
