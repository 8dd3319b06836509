"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): alternating local and global layers, norms before and after each
branch, soft-caps.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names

LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Gemma 2; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 4096  # of the local layers
    # LOCAL or GLOBAL for each layer; None: in turn, local first.
    layer_types: tuple[str, ...] | None = None
    query_scalar: int = 256  # scores are divided by its square root
    attention_softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """The mask of each layer."""
        masks = {LOCAL: ops.Causal() & ops.SlidingWindow(self.window), GLOBAL: ops.Causal()}
        return tuple(masks[kind] for kind in self.layer_types or _in_turn(self))


class Block(nn.Layer):
    """Sandwich norms: each branch is normalized before and after, so that its output has a learned scale."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        # Scores become 50 * tanh(q . k / sqrt(query_scalar) / 50): none is larger than 50.
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.attn = nn.Attention(
            D,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            scale=cfg.query_scalar**-0.5,
            softcap=cfg.attention_softcap,
            bias=bias,
            out_bias=bias,
            rngs=rngs,
        )
        self.attn_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn", norm=self.attn_post_norm)
        return nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp", norm=self.mlp_post_norm), cache, {}


def _in_turn(cfg: Any) -> tuple[str, ...]:
    return tuple(GLOBAL if i % 2 else LOCAL for i in range(cfg.num_layers))


class Gemma2(nn.Decoder):
    """Gemma 2: every other layer only attends to the last 4096 tokens; scores and logits are capped by a tanh."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, self.softcap = cfg, cfg.final_softcap
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(),
        fields.WINDOW,
        fields.layer_types(LOCAL, GLOBAL, usual=_in_turn),
        Field("query_scalar", "query_pre_attn_scalar"),
        Field("attention_softcap", "attn_logit_softcapping"),
        Field("final_softcap", "final_logit_softcapping"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gemma2": "Gemma2ForCausalLM"},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    # hidden_act is never read by transformers; the releases have both.
    fixed_if_present={"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    absent={"vocab": 256_000, "head_dim": 256},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.SANDWICH_NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_9B = Config(
    vocab=256_000, num_layers=42, dim=3584, mlp_dim=14_336, num_heads=16, num_kv_heads=8, head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)
PRESETS = {
    "gemma2-2b": replace(_9B, num_layers=26, dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2-9b": _9B,
    "gemma2-27b": replace(
        _9B, num_layers=46, dim=4608, mlp_dim=36_864, num_heads=32, num_kv_heads=16, head_dim=128,
        rope=Rope(128, 10_000.0, max_length=8192), query_scalar=144,
    ),
}
# fmt: on

FAMILY = Family("gemma2", Gemma2, FIELDS, _table, PRESETS)
