"""Seed-OSS (ByteDance Seed 2025): Llama's block at 36B, with biases on queries, keys and values only."""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_rope, names


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Seed-OSS; `PRESETS` has the published ones."""

    model_types = ("seed_oss",)
    architecture = "SeedOssForCausalLM"
    fixed = {"hidden_act": "silu"}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=128, null=lambda c: c.dim // c.num_heads)
    rope: Rope = hf_rope()
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", True)  # on queries, keys and values ...
    out_bias: bool = hf("attention_out_bias", False)  # ... and on what attention returns
    mlp_bias: bool = hf("mlp_bias", False)


class Block(nn.Layer):
    """Llama's layer, whose attention has its two kinds of biases apart."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, biases = cfg.dim, dict[str, Any](bias=cfg.attention_bias, out_bias=cfg.out_bias)
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, **heads, rope=cfg.rope, **biases, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class SeedOss(nn.Decoder):
    """Seed-OSS: a Llama whose heads together are twice as wide as the residual stream, for texts of 512k tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
PRESETS = {
    "seed-oss-36b": Config(
        vocab=155_136, num_layers=64, dim=5120, mlp_dim=27_648, num_heads=80, num_kv_heads=8, head_dim=128,
        rope=Rope(128, 10_000_000.0, max_length=524_288),
    )
}
# fmt: on

FAMILY = Family(name="seed_oss", model=SeedOss, config=Config, table=_table, presets=PRESETS)
