"""Granite 3 (IBM 2024): Llama with factors on embeddings, scores, residuals and logits."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Granite; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    embed_factor: float = 1.0
    score_factor: float = 1.0  # in place of head_dim ** -0.5
    residual_factor: float = 1.0
    logit_divisor: float = 1.0
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False


class Block(nn.Layer):
    """Llama's layer, whose branches are scaled before they are added."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            D,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope=cfg.rope,
            scale=cfg.score_factor,
            bias=bias,
            out_bias=bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.factor = cfg.residual_factor

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, self.factor * h, "attn")
        return nn.residual(x, self.factor * self.mlp(self.mlp_norm(x)), "mlp"), cache, {}


class Granite(nn.Decoder):
    """Granite: a Llama whose activations keep their size at any depth and width, by four factors."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        return self.cfg.embed_factor * self.embed(tokens, dtype=dtype)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head, divided."""
        # Applied here instead of in `logits`, because the loss uses hidden states and `head_weight` without `logits`.
        return super().leave(x, ctx) / self.cfg.logit_divisor


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(),
        *fields.MULTIPLIERS,
        fields.ATTENTION_BIAS,
    ],
    model_types={"granite": "GraniteForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"mlp_bias": False},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads, "norm_eps": 1e-6},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_2B = Config(
    vocab=49_152, num_layers=40, dim=2048, mlp_dim=8192, num_heads=32, num_kv_heads=8, head_dim=64,
    rope=Rope(64, 10_000.0, max_length=4096), embed_factor=12.0, score_factor=0.015625, residual_factor=0.22,
    logit_divisor=8.0, tied=True,
)
PRESETS = {
    "granite-3.0-2b": _2B,
    "granite-3.0-8b": replace(
        _2B, dim=4096, mlp_dim=12_800, head_dim=128, rope=replace(_2B.rope, dim=128), score_factor=0.0078125,
        logit_divisor=16.0,
    ),
}
# fmt: on

FAMILY = Family("granite", Granite, FIELDS, _table, PRESETS)
