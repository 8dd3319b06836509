"""Gemma 2B and 7B (Gemma team 2024, arXiv:2403.08295): scaled embeddings, GeGLU, norms that scale by one plus their
weight.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Gemma; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False


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
        x = nn.residual(x, h, "attn")
        return nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp"), cache, {}


class Gemma(nn.Decoder):
    """Gemma: tied embeddings, scaled by sqrt(D) at the input."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gemma": "GemmaForCausalLM"},
    fixed={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # the first releases say "gelu" and mean its tanh approximation
        "hidden_activation": "gelu_pytorch_tanh",
    },
    fixed_if_present={"use_bidirectional_attention": False},
    absent={"vocab": 256_000, "head_dim": 256},
)


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

FAMILY = Family("gemma", Gemma, FIELDS, _table, PRESETS)
