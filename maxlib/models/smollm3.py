"""SmolLM3: every fourth layer is not rotated (NoPE), the others as in Llama (Hugging Face 2025; Yang et al. 2025,
RNoPE).
"""

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
    """What distinguishes one SmolLM3 from another; `PRESETS` has the published one."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rotated: tuple[bool, ...] | None = None  # for each layer; None: all but every fourth
    window: int | None = None  # of the sliding layers
    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING each; None: all FULL
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for value, name in ((self.rotated, "rotated (no_rope_layers)"), (self.layer_types, "layer_types")):
            if value is not None and len(value) != self.num_layers:
                raise ValueError(f"{name} must have {self.num_layers} entries, one for each layer, got {len(value)}")
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

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """How each layer is rotated."""
        return tuple(self.rope if rotated else None for rotated in self.rotated or _rotated(self.num_layers, 4))

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "smollm3")
        fields.require("hidden_act", "silu")
        fields.ignore("max_window_layers")  # the release has it, from Qwen2; nothing reads it
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        num_layers = fields.take("num_hidden_layers", kind=int)
        every = _rotated(num_layers, fields.take("no_rope_layer_interval", 4))
        rotated = tuple(map(bool, fields.take("no_rope_layers", every, kind=list)))[:num_layers]
        window = fields.take("sliding_window", None, kind=int)
        window = window if fields.take("use_sliding_window", False) else None
        types = fields.layer_types(num_layers, FULL, SLIDING)
        types = types or tuple(FULL if window is None or rotary else SLIDING for rotary in rotated)
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=num_layers,
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", kind=int, nullable=True) or num_heads,
            head_dim=head_dim,
            rope=fields.rope(head_dim=head_dim, default_theta=2_000_000.0),
            rotated=None if rotated == _rotated(num_layers, 4) else rotated,
            window=window if SLIDING in types else None,
            layer_types=types if SLIDING in types else None,
            norm_eps=fields.take("rms_norm_eps", 1e-6),
            tied=fields.take("tie_word_embeddings", True),
            attention_bias=fields.take("attention_bias", False),
            mlp_bias=fields.take("mlp_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's SmolLM3 does not have."""
        types = self.layer_types or (FULL,) * self.num_layers
        return {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "no_rope_layers": [int(rope is not None) for rope in self.ropes],  # sic: 1 is rotated
            "no_rope_layer_interval": 4,
            "use_sliding_window": SLIDING in types,
            "sliding_window": self.window,
            "layer_types": list(types),
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


def _rotated(num_layers: int, interval: int) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(num_layers))


class Block(nnx.Module):
    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class SmolLM3(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        kinds = list(zip(cfg.masks, cfg.ropes, strict=True))
        make = lambda i, rngs: Block(cfg, *kinds[i], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(kinds), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


PRESETS = {
    "smollm3-3b": Config(
        vocab=128_256,
        num_layers=36,
        dim=2048,
        mlp_dim=11_008,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        rope=Rope(128, 5_000_000.0, max_length=65_536),
    )
}

FAMILY = Family(name="smollm3", model_types=("smollm3",), model=SmolLM3, config=Config, table=_table, presets=PRESETS)
