"""Gemma 2B and 7B (Gemma team 2024, arXiv:2403.08295): scaled embeddings, GeGLU, norms that scale by one plus their
weight.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_rope, names


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Gemma; `PRESETS` has the published ones."""

    model_types = ("gemma",)
    architecture = "GemmaForCausalLM"
    fixed = {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the first releases say "gelu" and mean its tanh approximation
        "hidden_activation": "gelu_pytorch_tanh",
    }
    fixed_if_present = {"use_bidirectional_attention": False}

    vocab: int = hf("vocab_size", absent=256_000)
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=256)
    rope: Rope = hf_rope()
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", True)
    attention_bias: bool = hf("attention_bias", False)


class Block(nn.Layer):
    """Llama's layer with GeGLU: `down(gelu(gate(x)) * up(x))`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N, K, H, bias = cfg.dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.attention_bias
        # plus_one: x / rms(x) * (1 + w), with w = 0 at first, so that weight decay pulls the scale to one.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        # N * H need not be D: the 7B has 16 heads of 256 beside a width of 3072. The 2B has one key head (MQA).
        self.attn = nn.Attention(
            D, num_heads=N, num_kv_heads=K, head_dim=H, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Gemma(nn.Decoder):
    """Gemma: tied embeddings, scaled by sqrt(D) at the input."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rope,)
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_7B = Config(
    vocab=256_000, num_layers=28, dim=3072, mlp_dim=24_576, num_heads=16, num_kv_heads=16, head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)
# fmt: on
PRESETS = {
    "gemma-2b": replace(_7B, num_layers=18, dim=2048, mlp_dim=16_384, num_heads=8, num_kv_heads=1),
    "gemma-7b": _7B,
}

FAMILY = Family(name="gemma", model=Gemma, config=Config, table=_table, presets=PRESETS)
