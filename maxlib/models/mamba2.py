"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state of fixed size in every layer, no attention and no MLP."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import TextDecoder, mamba2
from maxlib.models._sizes import MambaSizes
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Renamed, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(MambaSizes):
    """Sizes of a Mamba-2; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    head_dim: int = 64
    norm_eps: float = 1e-5
    tied: bool = False


class Block(nn.Layer):
    """`x + mamba(norm(x))`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mamba = mamba2(cfg.dim, cfg, head_dim=cfg.head_dim, norm_eps=cfg.norm_eps, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.mamba(self.norm(x), ctx, cache)
        return nn.residual(x, h, "attn"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty state."""
        return self.mamba.init_cache(batch, capacity, dtype)


class Mamba2(TextDecoder):
    """Mamba-2: decoding takes the same memory and time at any length."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


def _read_heads(hf: HFConfig, c: Any) -> int:
    heads, inner = hf.take("num_heads", 128), hf.take("expand", 2) * c.dim
    if heads * c.head_dim != inner:
        raise ValueError(
            f"{hf.where('num_heads')} times head_dim must be expand times hidden_size, {inner}, got {heads} heads of "
            f"{c.head_dim}."
        )
    return heads


def _write_heads(heads: int, cfg: Any) -> dict[str, Any]:
    return {"num_heads": heads, "expand": heads * cfg.head_dim // cfg.dim}


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_epsilon"),
        Field("head_dim"),
        Computed("mamba_heads", _read_heads, _write_heads),
        Field("mamba_groups", "n_groups"),
        Field("mamba_state", "state_size"),
        Field("mamba_bias", "use_bias"),
        Field("conv_width", "conv_kernel"),
        Field("conv_bias", "use_conv_bias"),
        fields.dt_limit(),
    ],
    model_types={"mamba2": "Mamba2ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"rms_norm": True},
    ignored=(
        *("chunk_size", "time_step_rank", "time_step_min", "time_step_max"),  # of the algorithm and of training
        "norm_before_gate",  # of early versions, which did not read it
        "residual_in_fp32",  # how a sum in bfloat16 is rounded
    ),
    absent={"mamba_groups": 8, "mamba_state": 128},
)


def _table(cfg: Config) -> Table:
    inner, groups = cfg.mamba_heads * cfg.head_dim, cfg.mamba_groups * cfg.mamba_state
    layer = [
        Weight("norm.weight", "norm.scale"),
        *names.mamba2("mixer", "mamba", heads=cfg.mamba_heads, inner=inner, groups=groups),
    ]
    return [
        Renamed("backbone.embedding.", "backbone.embeddings."),  # as the first releases called it
        *names.decoder_table(layer, model="backbone", embed="embeddings", norm="norm_f"),
    ]


# fmt: off
_130M = Config(vocab=50_288, num_layers=24, dim=768, mamba_heads=24, mamba_state=128, tied=True)
# fmt: on
PRESETS = {
    "mamba2-130m": _130M,
    "mamba2-370m": replace(_130M, num_layers=48, dim=1024, mamba_heads=32),
    "mamba2-780m": replace(_130M, num_layers=48, dim=1536, mamba_heads=48),
    "mamba2-1.3b": replace(_130M, num_layers=48, dim=2048, mamba_heads=64),
    "mamba2-2.7b": replace(_130M, num_layers=64, dim=2560, mamba_heads=80),
    "mamba-codestral-7b": replace(
        _130M, vocab=32_768, num_layers=64, dim=4096, mamba_heads=128, mamba_groups=8, tied=False
    ),
}

FAMILY = Family("mamba2", Mamba2, FIELDS, _table, PRESETS)
