"""Llama 2 to 3.3 (Touvron et al. 2023, arXiv:2307.09288; Llama team 2024, arXiv:2407.21783).

Start here: this file has the sizes, the layer and the model, then the names that Hugging Face uses, and the presets.
The other families are variations of it. `rngs` gives the random keys of initial values. Letters in shapes: B rows, T
tokens, D width of the residual stream, F width of the MLP, N query heads, K key (and value) heads, H width of a head, V
vocabulary size.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Llama3Scaling, Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names

MASK = ops.Causal()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Llama; `PRESETS` has the published ones."""

    vocab: int  # V
    num_layers: int
    dim: int  # D
    mlp_dim: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rope: Rope
    norm_eps: float = 1e-5
    tied: bool = False  # the head is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False


class Block(nn.Layer):
    """Pre-norm layer: attention, then the MLP; each normalizes its input and adds its output to the residual stream."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N, K, H, bias = cfg.dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.attention_bias
        # x / sqrt(mean(x^2) + eps) * scale, in float32: LayerNorm without the mean and the bias.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # Queries are [B, T, N, H], keys and values [B, T, K, H]: N / K query heads share a key head, which makes the KV
        # cache smaller by that factor. Positions only enter here, as rotations of queries and keys.
        self.attn = nn.Attention(
            D,
            num_heads=N,
            num_kv_heads=K,
            head_dim=H,
            mask=MASK,
            rope=cfg.rope,
            bias=bias,
            out_bias=bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # down(silu(gate(x)) * up(x)), [B, T, D] -> [B, T, F] -> [B, T, D] (SwiGLU, Shazeer 2020).
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, bias=cfg.mlp_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        # `ctx` has what all layers share: the first and last key that each query sees, and the rotary tables. `cache`
        # has this layer's keys and values of earlier tokens, None in training.
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        # x + h. The name is for gradient checkpointing (remat), which can keep h, and for `nn.capture`, which reads it.
        x = nn.residual(x, h, "attn")
        x = nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp")
        return x, cache, {}  # losses and metrics of the layer: none here, those of the router in a layer with experts


class Llama(nn.Decoder):
    """Llama: a pre-norm decoder of rotary grouped-query attention and SwiGLU.

    `nn.Decoder` (`nn/decoder/_decoder.py`) has the forward pass: `embed(tokens)`, the layers, `norm`; before the layers
    it turns each mask into the keys that each query sees, and each rope into its tables. `logits(hidden)` applies the
    head.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)  # [V, D]
        # Each weight of the layers is one array with a leading axis of layers, and one compiled layer runs over it in a
        # loop (`jax.lax.scan`), so that compile time does not grow with depth. `_` is a layer's kind: all are alike.
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)  # None: tied to `embed`


# Which field of config.json has each size. One that is missing there has the default above, or the one in `absent`.
# A field in `fixed` must have the value that stands there; anything else is an error.
FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(),
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
    ],
    model_types={"llama": "LlamaForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads, "norm_eps": 1e-6},
)


def _table(cfg: Config) -> Table:
    """Maps Hugging Face's tensor names to parameters: `...self_attn.q_proj.weight` is `layers.{i}.attn.q.w`."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_LLAMA2 = Config(
    vocab=32_000, num_layers=32, dim=4096, mlp_dim=11_008, num_heads=32, num_kv_heads=32, head_dim=128,
    rope=Rope(128, 10_000.0, max_length=4096),
)
_70B = dict(num_layers=80, dim=8192, mlp_dim=28_672, num_heads=64, num_kv_heads=8)
_405B = dict(num_layers=126, dim=16_384, mlp_dim=53_248, num_heads=128, num_kv_heads=8)
_LLAMA3 = replace(_LLAMA2, vocab=128_256, mlp_dim=14_336, num_kv_heads=8, rope=Rope(128, 500_000.0, max_length=8192))
# Llama3Scaling(factor, 1, 4, 8192): wavelengths above 8192 / 1 tokens grow by the factor, those below 8192 / 4 stay the
# same, and those in between change gradually.
_LLAMA3_1 = replace(_LLAMA3, rope=Rope(128, 500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192), max_length=131_072))
_LLAMA3_2 = replace(_LLAMA3_1, rope=Rope(128, 500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192), max_length=131_072), tied=True)
PRESETS = {
    "llama2-7b": _LLAMA2,
    "llama2-13b": replace(_LLAMA2, num_layers=40, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40),
    "llama2-70b": replace(_LLAMA2, **_70B),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, **_70B),
    "llama3.1-8b": _LLAMA3_1,
    "llama3.1-70b": replace(_LLAMA3_1, **_70B),
    "llama3.1-405b": replace(_LLAMA3_1, **_405B),
    "llama3.2-1b": replace(
        _LLAMA3_2, num_layers=16, dim=2048, mlp_dim=8192, head_dim=64, rope=replace(_LLAMA3_2.rope, dim=64)
    ),
    "llama3.2-3b": replace(_LLAMA3_2, num_layers=28, dim=3072, mlp_dim=8192, num_heads=24),
    "llama3.3-70b": replace(_LLAMA3_1, **_70B),
}
# fmt: on

FAMILY = Family("llama", Llama, FIELDS, _table, PRESETS)
