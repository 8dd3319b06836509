"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba-2 side by side in every layer, with muP's factors."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models._layers import TextDecoder, attention, mamba2
from maxlib.models._sizes import DECODER, MAMBA, AttentionSizes, MambaSizes, mamba_heads
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, MambaSizes):
    """Sizes of a Falcon-H1; `PRESETS` has the published ones."""

    mlp_dim: int
    mamba_dim: int  # of all heads of Mamba
    out_bias: bool = False
    normed: bool = False  # whether Mamba's output is, ...
    norm_first: bool = True  # ... before it is gated
    embed_factor: float = 1.0
    head_factor: float = 1.0
    key_factor: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    mamba_factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # on gate, x, b, c and dt
    mlp_factors: tuple[float, float] = (1.0, 1.0)  # on the gate and on the output
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class Block(nn.Layer):
    """Attention and Mamba-2 read the same input, and their outputs are added; then an MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        gate, self.mlp_out = cfg.mlp_factors
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        order = "norm_first" if cfg.norm_first else "gate_first"
        self.mamba = mamba2(
            D,
            cfg,
            head_dim=cfg.mamba_dim // cfg.mamba_heads,
            out_bias=cfg.out_bias,
            factors=cfg.mamba_factors,
            norm=order if cfg.normed else None,
            norm_eps=cfg.norm_eps,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=ScaledSiLU(gate), bias=cfg.mlp_bias, rngs=rngs)
        self.attn_in, self.attn_out = cfg.attention_in, cfg.attention_out
        self.mamba_in, self.mamba_out = cfg.mamba_in, cfg.mamba_out

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, (keys, state) = self.attn_norm(x), (None, None) if cache is None else cache
        attended, keys = self.attn(self.attn_in * h, ctx, keys)
        mixed, state = self.mamba(self.mamba_in * h, ctx, state)
        x = nn.residual(x, self.attn_out * attended + self.mamba_out * mixed, "attn")
        x = nn.residual(x, self.mlp_out * self.mlp(self.mlp_norm(x)), "mlp")
        return x, None if cache is None else (keys, state), {}

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty cache: keys and values, and a state."""
        return tuple(mixer.init_cache(batch, capacity, dtype) for mixer in (self.attn, self.mamba))


@dataclass(frozen=True)
class ScaledSiLU:
    """Activation `silu(factor * x)`."""

    factor: float

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the function to each number."""
        return jax.nn.silu(self.factor * x)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    # A factor on keys is one on scores.
    scale = cfg.key_factor * cfg.head_dim**-0.5
    return attention(cfg, rope=cfg.rope, bias=cfg.attention_bias, out_bias=cfg.attention_bias, scale=scale, rngs=rngs)


class FalconH1(TextDecoder):
    """Falcon-H1: every layer has both attention and a recurrent state."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        return self.cfg.embed_factor * self.embed(tokens, dtype=dtype)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head, scaled."""
        # Applied here instead of in `logits`, because the loss uses hidden states and `head_weight` without `logits`.
        return self.cfg.head_factor * super().leave(x, ctx)


def _read_inner(hf: HFConfig, c: Any) -> int:
    expand = hf.take("mamba_expand", 2)
    inner = hf.take("mamba_d_ssm", 1024, kind=int, nullable=True)
    return expand * c.dim if inner is None else inner


def _factors(name: str, hf_name: str, count: int) -> Computed:
    """Makes the entry for several factors, ones unless a config has them."""

    def read(hf: HFConfig, c: Any) -> tuple[float, ...]:
        factors = hf.take(hf_name, [1.0] * count, kind=list)
        if len(factors) != count:
            raise ValueError(f"{hf.where(hf_name)} must have {count} numbers, got {len(factors)}.")
        return tuple(float(x) for x in factors)

    return Computed(name, read, lambda value, cfg: {hf_name: list(value)})


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(default_length=8192),
        Computed("mamba_dim", _read_inner, lambda width, cfg: {"mamba_d_ssm": width}),
        mamba_heads(lambda c: c.mamba_dim),
        *MAMBA,
        Field("out_bias", "projectors_bias"),
        Field("normed", "mamba_rms_norm"),
        Field("norm_first", "mamba_norm_before_gate"),
        Field("embed_factor", "embedding_multiplier"),
        Field("head_factor", "lm_head_multiplier"),
        Field("key_factor", "key_multiplier"),
        Field("attention_in", "attention_in_multiplier"),
        Field("attention_out", "attention_out_multiplier"),
        Field("mamba_in", "ssm_in_multiplier"),
        Field("mamba_out", "ssm_out_multiplier"),
        _factors("mamba_factors", "ssm_multipliers", 5),
        _factors("mlp_factors", "mlp_multipliers", 2),
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
    ],
    model_types={"falcon_h1": "FalconH1ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"mamba_use_mlp": True},
    ignored=("mlp_expansion_factor", "expansion_factor"),  # of code that transformers does not have
    absent={"num_kv_heads": 8, "head_dim": fields.equal_heads, "mamba_state": 256},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.norms(attn_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        *names.ATTENTION,
        *names.mlp("feed_forward.{}_proj", "mlp"),
    ]
    groups = cfg.mamba_groups * cfg.mamba_state
    layer += names.mamba2("mamba", "mamba", heads=cfg.mamba_heads, inner=cfg.mamba_dim, groups=groups)
    return names.decoder_table(layer, norm="final_layernorm")


# fmt: off
PRESETS = {
    "falcon-h1-0.5b": Config(
        vocab=32_784, num_layers=36, dim=1024, mlp_dim=2048, num_heads=8, num_kv_heads=2, head_dim=64,
        rope=Rope(64, 100_000_000_000.0, max_length=16_384), mamba_dim=1536, mamba_heads=24, mamba_state=128,
        norm_first=False, embed_factor=5.656854249492381, head_factor=0.0390625, key_factor=0.39062499999999994,
        attention_out=0.9375, mamba_in=1.25, mamba_out=0.23570226039551587,
        mamba_factors=(0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738),
        mlp_factors=(0.8838834764831844, 0.5859375),
    ),
}
# fmt: on

FAMILY = Family("falcon_h1", FalconH1, FIELDS, _table, PRESETS)
