"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP read one norm, a part of each head is rotated in pairs of
neighbours, and the head has a bias.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxlib import nn
from maxlib.models._layers import Parallel, TextDecoder
from maxlib.models._sizes import Sizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Table, Weight, names


@dataclass(frozen=True, kw_only=True)
class Config(Sizes):
    """Sizes of a GPT-J; `PRESETS` has the published one."""

    mlp_dim: int
    rope: Rope  # of a part of each head
    norm_eps: float = 1e-5


class Block(Parallel):
    """`x + attn(h) + mlp(h)`, where `h` is the layer norm of `x`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N = cfg.dim, cfg.num_heads
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, num_heads=N, head_dim=D // N, rope=cfg.rope, rngs=rngs)
        self.mlp = nn.MLP(D, cfg.mlp_dim, rngs=rngs)  # gelu by tanh


class GPTJ(TextDecoder):
    """GPT-J: both branches of a layer at once."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)
        self.head_bias = nnx.Param(jnp.zeros(cfg.vocab), axes=("vocab",))


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    width = hf.take("rotary_dim", 64, kind=int)
    return Rope(width, interleaved=True, max_length=hf.take("n_positions", 2048))


def _write_rope(rope: Rope, cfg: Config) -> dict[str, Any]:
    if rope != Rope(rope.dim, interleaved=True, max_length=rope.max_length):
        raise ValueError(f"GPT-J's config.json has a width and a length of the rope only, got {rope}")
    return {"rotary_dim": rope.dim, "n_positions": rope.max_length}


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "n_layer"),
        Field("dim", "n_embd"),
        Field("mlp_dim", "n_inner"),
        Field("num_heads", "n_head"),
        Field("norm_eps", "layer_norm_epsilon"),
        Field("tied", "tie_word_embeddings"),
        Computed("rope", _read_rope, _write_rope),
    ],
    model_types={"gptj": "GPTJForCausalLM"},
    fixed={"activation_function": ("gelu_new", "gelu_pytorch_tanh")},  # two names of one formula
    ignored=("scale_attn_weights", "rotary", "n_ctx"),  # of early versions
    absent={"mlp_dim": lambda c: 4 * c.dim},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.layer_norm("ln_1", "attn_norm"),
        *names.attention("attn.{}_proj", "attn", out="attn.out_proj"),
        *names.linear("mlp.fc_in", "mlp.up"),
        *names.linear("mlp.fc_out", "mlp.down"),
    ]
    return [
        *names.decoder_table(layer, model="transformer", embed="wte", layers="h", norm="ln_f"),
        Weight("lm_head.bias", "head_bias"),
        # Buffers of early releases: the causal mask, and what hides keys.
        *[Ignore(f"transformer.h.{{i}}.attn.{name}") for name in ("bias", "masked_bias", "embed_positions")],
    ]


# fmt: off
PRESETS = {
    "gpt-j-6b": Config(
        vocab=50_400, num_layers=28, dim=4096, mlp_dim=16_384, num_heads=16,
        rope=Rope(64, interleaved=True, max_length=2048),
    ),
}
# fmt: on

FAMILY = Family("gptj", GPTJ, FIELDS, _table, PRESETS)
