"""SmolLM3 (Hugging Face 2025): Llama, but every fourth layer has no rotary positions (NoPE, as in RNoPE by Yang et al.
2025, arXiv:2501.18795).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import (
    Family,
    HFConfig,
    ModelConfig,
    Table,
    hf,
    hf_fields,
    hf_layer_types,
    hf_rope,
    hf_switched_window,
    names,
    switched_window,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def _rotated(num_layers: int, interval: int = 4) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(num_layers))


def _read_rotated(fields: HFConfig, c: Any) -> tuple[bool, ...] | None:
    every = _rotated(c.num_layers, fields.take("no_rope_layer_interval", 4))
    rotated = tuple(map(bool, fields.take("no_rope_layers", every, kind=list)))[: c.num_layers]
    return None if rotated == _rotated(c.num_layers) else rotated


def _write_rotated(value: tuple[bool, ...] | None, cfg: Any) -> dict[str, Any]:
    rotated = [int(rope is not None) for rope in cfg.ropes]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4}  # sic: 1 is rotated


def _by_rotation(fields: HFConfig, c: Any) -> tuple[str, ...]:
    """Returns the layer types that config.json implies: with a window, the layers without rotary positions have it."""
    window = switched_window(fields, absent=None)
    rotated = c.rotated or _rotated(c.num_layers)
    return tuple(FULL if window is None or rotary else SLIDING for rotary in rotated)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a SmolLM3; `PRESETS` has the published ones."""

    model_types = ("smollm3",)
    architecture = "SmolLM3ForCausalLM"
    fixed = {"hidden_act": "silu"}
    ignored = ("max_window_layers",)  # in the released config, copied from Qwen2; unused

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=lambda c: c.dim // c.num_heads)
    rope: Rope = hf_rope(default_theta=2_000_000.0)
    # Whether each layer has rotary positions; None: all but every fourth.
    rotated: tuple[bool, ...] | None = hf_fields(_read_rotated, _write_rotated, default=None)
    # FULL or SLIDING for each layer; None: all are FULL.
    layer_types: tuple[str, ...] | None = hf_layer_types(
        FULL, SLIDING, usual=lambda c: (FULL,) * c.num_layers, absent=_by_rotation
    )
    window: int | None = hf_switched_window(absent=None)  # of the sliding layers
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", True)
    attention_bias: bool = hf("attention_bias", False)
    mlp_bias: bool = hf("mlp_bias", False)

    def __post_init__(self):
        super().__post_init__()
        if self.rotated is not None and len(self.rotated) != self.num_layers:
            raise ValueError(
                f"rotated (no_rope_layers) must have {self.num_layers} entries, one for each layer, got "
                f"{len(self.rotated)}"
            )

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """The mask of each layer."""
        if self.layer_types is None or self.window is None:
            return (ops.Causal(),) * self.num_layers
        masks = {FULL: ops.Causal(), SLIDING: ops.Causal() & ops.SlidingWindow(self.window)}
        return tuple(masks[kind] for kind in self.layer_types)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotation of each layer."""
        return tuple(self.rope if rotated else None for rotated in self.rotated or _rotated(self.num_layers))


class Block(nn.Layer):
    """Llama's layer; without a rope, its attention gets the order of tokens only from the causal mask."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, **heads, mask=mask, rope=rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class SmolLM3(nn.Decoder):
    """SmolLM3: three layers with rotary positions, one without, which generalises better to longer texts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(
            lambda kind, rngs: Block(cfg, *kind, rngs=rngs), tuple(zip(cfg.masks, cfg.ropes, strict=True)), rngs=rngs
        )
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
PRESETS = {
    "smollm3-3b": Config(
        vocab=128_256, num_layers=36, dim=2048, mlp_dim=11_008, num_heads=16, num_kv_heads=4, head_dim=128,
        rope=Rope(128, 5_000_000.0, max_length=65_536),
    )
}
# fmt: on

FAMILY = Family(name="smollm3", model=SmolLM3, config=Config, table=_table, presets=PRESETS)
