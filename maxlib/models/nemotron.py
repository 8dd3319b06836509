"""Nemotron 4 and Minitron (NVIDIA 2024, arXiv:2402.16819, 2407.14679): LayerNorm, a squared ReLU without a gate, and
half of each head rotated.
"""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention, squared_relu
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a dense Nemotron; `PRESETS` has the published ones."""

    mlp_dim: int
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Llama's layer with LayerNorm, whose weights are stored less one, and an MLP without a gate."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.attn = attention(cfg, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=squared_relu, bias=cfg.mlp_bias, rngs=rngs)


class Nemotron(TextDecoder):
    """Nemotron 4 and the models pruned from it."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.decoder("norm_eps"),
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(partial=True, default_fraction=0.5),
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
    ],
    model_types={"nemotron": "NemotronForCausalLM"},
    fixed={"hidden_act": "relu2"},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.LAYER_NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_4B = Config(
    vocab=256_000, num_layers=32, dim=3072, mlp_dim=9216, num_heads=24, num_kv_heads=8, head_dim=128,
    rope=Rope(64, max_length=4096),
)
# fmt: on
PRESETS = {
    "minitron-4b": _4B,
    "minitron-8b": replace(_4B, dim=4096, mlp_dim=16_384, num_heads=48),
}

FAMILY = Family("nemotron", Nemotron, FIELDS, _table, PRESETS)
