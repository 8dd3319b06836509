"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388): a norm on each head of queries and keys before their rotation."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_max_window_layers, hf_rope, hf_switched_window, names

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Qwen3; `PRESETS` has the published ones."""

    model_types = ("qwen3",)
    architecture = "Qwen3ForCausalLM"
    fixed = {"hidden_act": "silu"}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=128)
    rope: Rope = hf_rope()
    # FULL or SLIDING for each layer; None: all are FULL.
    layer_types: tuple[str, ...] | None = hf_max_window_layers(FULL, absent=28, window=4096)
    window: int | None = hf_switched_window(absent=4096)  # of the sliding layers
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", False)

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """The mask of each layer."""
        if self.layer_types is None or self.window is None:
            return (ops.Causal(),) * self.num_layers
        masks = {FULL: ops.Causal(), SLIDING: ops.Causal() & ops.SlidingWindow(self.window)}
        return tuple(masks[kind] for kind in self.layer_types)


class Block(nn.Layer):
    """Llama's layer with norms on queries and keys."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        # One scale [H] for all heads. Scores stay bounded: |q . k| <= H * max(scale_q) * max(scale_k).
        norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps)
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            D, **heads, mask=mask, rope=cfg.rope, bias=bias, out_bias=bias, q_norm=norm(), k_norm=norm(), rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Qwen3(nn.Decoder):
    """Qwen3: Qwen2 with norms on queries and keys in place of biases, and a head width of its own."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)  # each mask once
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_8B = Config(
    vocab=151_936, num_layers=36, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=40_960),
)
# fmt: on
PRESETS = {
    "qwen3-0.6b": replace(_8B, num_layers=28, dim=1024, mlp_dim=3072, num_heads=16, tied=True),
    "qwen3-1.7b": replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16, tied=True),
    "qwen3-4b": replace(_8B, dim=2560, mlp_dim=9728, tied=True),
    "qwen3-8b": _8B,
    "qwen3-14b": replace(_8B, num_layers=40, dim=5120, mlp_dim=17_408, num_heads=40),
    "qwen3-32b": replace(_8B, num_layers=64, dim=5120, mlp_dim=25_600, num_heads=64),
}

FAMILY = Family(name="qwen3", model=Qwen3, config=Config, table=_table, presets=PRESETS)
