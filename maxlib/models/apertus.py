"""Apertus (Swiss AI 2025, arXiv:2509.14233): Qwen3's attention, and an ungated MLP with a trained activation."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes
from maxlib.ops import Llama3Scaling, Rope
from maxlib.weights import Family, Fields, Table, Weight, fields, names

_SCALED = Llama3Scaling(8.0, 1.0, 4.0, 8192)


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an Apertus; `PRESETS` has the published ones."""

    mlp_dim: int
    norm_eps: float = 1e-5
    attention_bias: bool = False


class Block(PreNorm):
    """Llama's layer with norms on the heads of queries and keys, and an ungated MLP under xIELU."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # down(xielu(up(x))): two matrices where SwiGLU has three.
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=XIELU(), bias=False, rngs=rngs)


class Fixed(nnx.Variable):
    """A stored number that is not trained."""


class XIELU(nnx.Module):
    """Activation with trained shape (Huang & Schlag 2024, arXiv:2411.13010).

    Computes `a_p x^2 + beta x` for positive `x` and `a_n (expm1(min(x, eps)) - x) + beta x` for others, where
    `a_p = softplus(alpha_p)` and `a_n = beta + softplus(alpha_n)`. All four numbers are stored; the alphas are trained.

    Args:
        a_p: Initial value of `a_p`.
        a_n: Initial value of `a_n`, more than `beta`.
        beta: Slope at zero.
        eps: Where the exponential ends, a little below zero.
    """

    def __init__(self, a_p: float = 0.8, a_n: float = 0.8, *, beta: float = 0.5, eps: float = -1e-6):
        # log(expm1(y)) is the inverse of softplus. [1] each, as files have them.
        self.alpha_p = nnx.Param(jnp.log(jnp.expm1(jnp.full(1, a_p, jnp.float32))), axes=("norm",))
        self.alpha_n = nnx.Param(jnp.log(jnp.expm1(jnp.full(1, a_n - beta, jnp.float32))), axes=("norm",))
        self.beta, self.eps = Fixed(jnp.float32(beta), axes=()), Fixed(jnp.float32(eps), axes=())

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the function to each number, in float32, and returns the dtype of `x`."""
        x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        alphas, beta, eps = (self.alpha_p, self.alpha_n), self.beta[...], self.eps[...]
        a_p, a_n = (jax.nn.softplus(alpha[...][0].astype(x32.dtype)) for alpha in alphas)
        below = (a_n + beta) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, a_p * x32 * x32, below) + beta * x32).astype(x.dtype)


class Apertus(TextDecoder):
    """Apertus: a multilingual model with open data, whose layers train the shape of their activation."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *DECODER,
        # A config that says nothing of the rope means the scaled one.
        fields.rope(default_theta=12_000_000.0, default_length=65_536, default_scaling=_SCALED),
        fields.ATTENTION_BIAS,
    ],
    model_types={"apertus": "ApertusForCausalLM"},
    fixed={"hidden_act": "xielu"},
    fixed_if_present={"post_norm": False, "qk_norm": True},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    norms = names.norms(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    act = [Weight(f"mlp.act_fn.{name}", f"mlp.act.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")]
    return names.decoder_table([*norms, *names.ATTENTION, *names.MLP, *act])


# fmt: off
_8B = Config(
    vocab=131_072, num_layers=32, dim=4096, mlp_dim=21_504, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 12_000_000.0, _SCALED, max_length=65_536),
)
# fmt: on
PRESETS = {
    "apertus-8b": _8B,
    "apertus-70b": replace(_8B, num_layers=80, dim=8192, mlp_dim=43_008, num_heads=64),
}

FAMILY = Family("apertus", Apertus, FIELDS, _table, PRESETS)
