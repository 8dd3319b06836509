"""OLMo 2 and 3: norms behind attention and MLP, and over all heads of queries and keys (OLMo team 2024, 2025)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, Weight, names, rope_to_hf

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one OLMo from another; `PRESETS` has the published ones. With a window it is an OLMo 3."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope  # without its scaling on sliding layers
    window: int | None = None  # of the sliding layers
    layer_types: tuple[str, ...] | None = (
        None  # FULL or SLIDING each; None: every fourth is FULL, without a window all are
    )
    norm_eps: float = 1e-6
    tied: bool = False
    attention_bias: bool = False

    def __post_init__(self):
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}")
        if self.layer_types is not None and self.window is None:
            raise ValueError("layer_types are those of OLMo 3, which needs a window, got none")

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or SLIDING for each layer."""
        return self.layer_types or _pattern(self.num_layers, 1 if self.window is None else 4)

    @property
    def kinds(self) -> dict[str, tuple[ops.Mask, Rope]]:
        """What layers of each type see, and how they are rotated."""
        full: dict[str, tuple[ops.Mask, Rope]] = {FULL: (ops.Causal(), self.rope)}
        if self.window is None:
            return full
        window, near = ops.Causal() & ops.SlidingWindow(self.window), dataclasses.replace(self.rope, scaling=None)
        return full | {SLIDING: (window, near)}

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        is_3 = fields.require("model_type", "olmo2", "olmo3") == "olmo3"
        fields.require("hidden_act", "silu")
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        num_layers = fields.take("num_hidden_layers", kind=int)
        types = fields.layer_types(num_layers, FULL, SLIDING) if is_3 else None
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=num_layers,
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rope=_read_ropes(fields, head_dim) if is_3 else fields.rope(head_dim=head_dim),
            window=fields.take("sliding_window", 4096) if is_3 else None,
            layer_types=None if types == _pattern(num_layers, 4) else types,
            norm_eps=fields.take("rms_norm_eps", 1e-5),
            tied=fields.take("tie_word_embeddings", False),
            attention_bias=fields.take("attention_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's OLMo does not have."""
        fields = {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }
        if self.window is None:
            return fields
        near = {"rope_type": "default", "rope_theta": self.rope.theta}
        return fields | {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "sliding_window": self.window,
            "layer_types": list(self.types),
            "rope_parameters": {FULL: fields["rope_parameters"], SLIDING: near},
        }


def _pattern(num_layers: int, period: int) -> tuple[str, ...]:
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))


def _read_ropes(fields: HFConfig, head_dim: int) -> Rope:
    """OLMo 3's rope of full layers. Raises ValueError if that of sliding ones is not the same without scaling."""
    parameters = fields.take("rope_parameters", None, kind=dict)
    if parameters and not {FULL, SLIDING} <= parameters.keys():
        raise ValueError(
            f"config.json: rope_parameters must describe {FULL} and {SLIDING} apart, got {', '.join(parameters)}: "
            "which layers are scaled differs between the versions of transformers that write one for both."
        )
    far = fields.rope(head_dim=head_dim, default_theta=500_000.0, layer_type=FULL)
    near = fields.rope(head_dim=head_dim, default_theta=500_000.0, layer_type=SLIDING, scaling_field=None)
    if near.theta != far.theta or near.scaling is not None:
        raise ValueError(
            f"config.json: rope_parameters.{SLIDING} must be as {FULL} without its scaling, got {near} and {far}: "
            "this architecture computes nothing else."
        )
    return far


class HeadsNorm(nnx.Module):
    """RMS norm over all heads together."""

    def __init__(self, num_heads: int, head_dim: int, *, eps: float):
        self.norm = nn.RMSNorm(num_heads * head_dim, eps=eps)

    def __call__(self, x: Float[Array, "... N H"]) -> Float[Array, "... N H"]:
        return self.norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope, *, rngs: nnx.Rngs):
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            q_norm=HeadsNorm(cfg.num_heads, cfg.head_dim, eps=cfg.norm_eps),
            k_norm=HeadsNorm(cfg.num_kv_heads, cfg.head_dim, eps=cfg.norm_eps),
            rngs=rngs,
        )
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(x, ctx, cache)
        x = constrain(x + self.attn_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_norm(checkpoint_name(self.mlp(x), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class OLMo2(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = zip(*cfg.kinds.values(), strict=True)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        make = lambda i, rngs: Block(cfg, *cfg.kinds[cfg.types[i]], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(cfg.types), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights."""
    layer = [
        *names.ATTENTION,
        Weight("self_attn.q_norm.weight", "attn.q_norm.norm.scale"),
        Weight("self_attn.k_norm.weight", "attn.k_norm.norm.scale"),
        Weight("post_attention_layernorm.weight", "attn_norm.scale"),
        *names.MLP,
        Weight("post_feedforward_layernorm.weight", "mlp_norm.scale"),
    ]
    return names.decoder_table(layer)


_7B = Config(
    vocab=100_352,
    num_layers=32,
    dim=4096,
    mlp_dim=11_008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rope=Rope(128, 500_000.0, max_length=4096),
)
_1B = dict(num_layers=16, dim=2048, mlp_dim=8192, num_heads=16, num_kv_heads=16)
_13B = dict(num_layers=40, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40)
_32B = dict(num_layers=64, dim=5120, mlp_dim=27_648, num_heads=40, num_kv_heads=8)
_LONG = Rope(128, 500_000.0, Yarn(8.0, 8192, attention_factor=1.2079441541679836), max_length=65_536)
_SHORT = Rope(128, 500_000.0, max_length=8192)  # in pretraining
_OLMO3 = dict(vocab=100_278, window=4096, rope=_LONG)
PRESETS = {
    "olmo2-1b": dataclasses.replace(_7B, **_1B),
    "olmo2-7b": _7B,
    "olmo2-13b": dataclasses.replace(_7B, **_13B),
    "olmo2-32b": dataclasses.replace(_7B, **_32B),
    "olmo3-7b-pt": dataclasses.replace(_7B, **_OLMO3 | {"rope": _SHORT}),
    "olmo3-7b": dataclasses.replace(_7B, **_OLMO3),
    "olmo3-32b": dataclasses.replace(_7B, **_32B, **_OLMO3),
}

FAMILY = Family(name="olmo2", model_types=("olmo2", "olmo3"), model=OLMo2, config=Config, table=_table, presets=PRESETS)
