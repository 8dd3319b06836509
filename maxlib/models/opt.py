"""OPT (Zhang et al. 2022, arXiv:2205.01068): GPT-2 with ReLU; the table of positions begins with two unused rows."""

from dataclasses import dataclass

import jax
from flax import nnx

from maxlib import nn
from maxlib.models._layers import PositionedDecoder, PreNorm
from maxlib.models._sizes import Sizes
from maxlib.weights import Family, Field, Fields, Renamed, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(Sizes):
    """Sizes of an OPT; `PRESETS` has the published ones."""

    mlp_dim: int
    num_positions: int = 2048
    norm_eps: float = 1e-5  # always, no field of config.json
    tied: bool = True


class Block(PreNorm):
    """GPT-2's layer with ReLU."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N = cfg.dim, cfg.num_heads
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, num_heads=N, head_dim=D // N, bias=True, out_bias=True, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=jax.nn.relu, rngs=rngs)


class OPT(PositionedDecoder):
    """OPT: open weights in the sizes of GPT-3."""

    first_position = 2

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.positions = nn.LearnedPositions(cfg.num_positions + self.first_position, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.without(fields.DECODER, "norm_eps"),
        Field("mlp_dim", "ffn_dim"),
        Field("num_heads", "num_attention_heads"),
        Field("num_positions", "max_position_embeddings"),
    ],
    model_types={"opt": "OPTForCausalLM"},
    # The 350M model alone has other norms, and projections around its layers.
    fixed={
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": lambda c: (c.dim, None),
    },
    fixed_if_present={"_remove_final_layer_norm": False},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.layer_norm("self_attn_layer_norm", "attn_norm"),
        *names.attention("self_attn.{}_proj", "attn", out="self_attn.out_proj"),
        *names.layer_norm("final_layer_norm", "mlp_norm"),
        *names.linear("fc1", "mlp.up"),
        *names.linear("fc2", "mlp.down"),
    ]
    return [
        *names.decoder_table(layer, model="model.decoder", norm="final_layer_norm"),
        Weight("model.decoder.embed_positions.weight", "positions.w"),
        Renamed("decoder.", "model.decoder."),  # of early releases
    ]


def _opt(num_layers: int, dim: int, num_heads: int) -> Config:
    return Config(vocab=50_272, num_layers=num_layers, dim=dim, mlp_dim=4 * dim, num_heads=num_heads)


PRESETS = {
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
}

FAMILY = Family("opt", OPT, FIELDS, _table, PRESETS)
