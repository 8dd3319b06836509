"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): LayerNorm, biases, an MLP without a gate, and a window."""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, causal
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a StarCoder 2; `PRESETS` has the published ones."""

    mlp_dim: int
    window: int | None = None  # None: every token attends to all earlier ones
    bias: bool = True  # of all projections
    norm_eps: float = 1e-5
    tied: bool = True


class Block(PreNorm):
    """GPT-2's layer with rotary grouped-query attention under a window."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.bias
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=causal(cfg.window), rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.MLP(D, cfg.mlp_dim, bias=bias, rngs=rngs)  # gelu by tanh


class StarCoder2(TextDecoder):
    """StarCoder 2: code in 619 languages, under a window of 4,096 tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.decoder("norm_epsilon"),
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(),
        fields.WINDOW,
        Field("bias", "use_bias"),
    ],
    model_types={"starcoder2": "Starcoder2ForCausalLM"},
    fixed={"hidden_act": ("gelu_pytorch_tanh", "gelu_new")},  # two names of one formula
    fixed_if_present={"mlp_type": "default", "norm_type": "layer_norm"},  # in the releases
    absent={"num_kv_heads": 2},
)


def _table(cfg: Config) -> Table:
    mlp = [*names.linear("mlp.c_fc", "mlp.up"), *names.linear("mlp.c_proj", "mlp.down")]
    return names.decoder_table([*names.LAYER_NORMS, *names.ATTENTION, *mlp])


# fmt: off
_3B = Config(
    vocab=49_152, num_layers=30, dim=3072, mlp_dim=12_288, num_heads=24, num_kv_heads=2, head_dim=128,
    rope=Rope(128, 999_999.4420358813, max_length=16_384), window=4096,
)
PRESETS = {
    "starcoder2-3b": _3B,
    "starcoder2-7b": replace(
        _3B, num_layers=32, dim=4608, mlp_dim=18_432, num_heads=36, num_kv_heads=4,
        rope=Rope(128, 1_000_000.0, max_length=16_384),
    ),
    "starcoder2-15b": replace(
        _3B, num_layers=40, dim=6144, mlp_dim=24_576, num_heads=48, num_kv_heads=4,
        rope=Rope(128, 100_000.0, max_length=16_384), tied=False,
    ),
}
# fmt: on

FAMILY = Family("starcoder2", StarCoder2, FIELDS, _table, PRESETS)
