"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv:2306.11644; Li et al. 2023, arXiv:2309.05463): attention and
MLP read one norm, biases everywhere, also of the head, and a part of each head rotated.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib.models._layers import Parallel, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Phi; `PRESETS` has the published ones."""

    mlp_dim: int
    norm_eps: float = 1e-5


class Block(Parallel):
    """`x + attn(h) + mlp(h)`, where `h` is the layer norm of `x`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=True, out_bias=True, rngs=rngs)
        self.mlp = nn.MLP(cfg.dim, cfg.mlp_dim, rngs=rngs)  # gelu by tanh


class Phi(TextDecoder):
    """Phi: small models of code and textbooks."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)
        self.head_bias = nnx.Param(jnp.zeros(cfg.vocab), axes=("vocab",))


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_eps"),
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(partial=True, default_length=2048, default_fraction=0.5),
    ],
    model_types={"phi": "PhiForCausalLM"},
    fixed={"hidden_act": ("gelu_new", "gelu_pytorch_tanh"), "qk_layernorm": False},
    absent={"num_kv_heads": fields.num_heads},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.layer_norm("input_layernorm", "attn_norm"),
        *names.attention("self_attn.{}_proj", "attn", out="self_attn.dense"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    return [*names.decoder_table(layer, norm="final_layernorm"), Weight("lm_head.bias", "head_bias")]


# fmt: off
_1B = Config(
    vocab=51_200, num_layers=24, dim=2048, mlp_dim=8192, num_heads=32, num_kv_heads=32, head_dim=64,
    rope=Rope(32, max_length=2048),
)
PRESETS = {
    "phi-1": _1B,
    "phi-1.5": _1B,
    "phi-2": replace(_1B, num_layers=32, dim=2560, mlp_dim=10_240, head_dim=80),
}
# fmt: on

FAMILY = Family("phi", Phi, FIELDS, _table, PRESETS)
