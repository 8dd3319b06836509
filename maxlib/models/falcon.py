"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): attention and MLP side by side, one key head or a few, LayerNorm,
an MLP without a gate. Its variants with ALiBi are not here.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import Parallel, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.nn.vision import exact_gelu
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Falcon; `PRESETS` has the published ones."""

    mlp_dim: int
    two_norms: bool = False  # one for each branch
    grouped: bool = False  # config.json's `new_decoder_architecture`: any number of key heads
    bias: bool = False  # of all projections
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self):
        if not self.grouped and (self.two_norms or self.num_kv_heads not in (1, self.num_heads)):
            raise ValueError(
                f"without grouped (new_decoder_architecture), a Falcon must have one norm for each layer, and 1 or "
                f"{self.num_heads} key heads, got {self.num_kv_heads} and two_norms={self.two_norms}"
            )


class Block(Parallel):
    """`x + attn(attn_norm(x)) + mlp(mlp_norm(x))`; with one norm, both branches read the same."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.bias
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps) if cfg.two_norms else None
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=exact_gelu, bias=bias, rngs=rngs)


class Falcon(TextDecoder):
    """Falcon: both branches of a layer at once, and few key heads for a small cache."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)


def _read_kv_heads(hf: HFConfig, c: Any) -> int:
    number, single = hf.take("num_kv_heads", c.num_heads), hf.take("multi_query", True)
    if c.grouped:
        return number
    return 1 if single else c.num_heads


def _write_kv_heads(number: int, cfg: Config) -> dict[str, Any]:
    return {"num_kv_heads": number if cfg.grouped else cfg.num_heads, "multi_query": number == 1}


def _read_two_norms(hf: HFConfig, c: Any) -> bool:
    return hf.require("num_ln_in_parallel_attn", *((2, 1, None) if c.grouped else (None, 1))) == 2


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_epsilon"),
        Field("mlp_dim", "ffn_hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("grouped", "new_decoder_architecture"),
        Computed("num_kv_heads", _read_kv_heads, _write_kv_heads),
        Computed("two_norms", _read_two_norms, lambda value, cfg: {"num_ln_in_parallel_attn": 2 if value else 1}),
        fields.EQUAL_HEADS,
        fields.rope(default_length=2048),
        Field("bias"),
    ],
    model_types={"falcon": "FalconForCausalLM"},
    fixed={"activation": "gelu", "alibi": False, "parallel_attn": True},
    ignored=("apply_residual_connection_post_layernorm",),  # in releases, read by nothing
    absent={"mlp_dim": lambda c: 4 * c.dim},
)


def _table(cfg: Config) -> Table:
    # Rows of each key head: its G queries, its key, its value.
    G, fused = cfg.num_heads // cfg.num_kv_heads, "self_attention.query_key_value"
    layer = []
    for suffix, leaf, axes in (("weight", "w", (" D", " D")), ("bias", "b", ("", ""))):
        rows, cut = f"(K R H){axes[0]}", f"H{axes[1]}"
        for n in range(cfg.num_heads):
            at = {"K": n // G, "R": n % G}
            layer.append(Weight(f"{fused}.{suffix}", f"attn.q.{leaf}", f"{rows} -> N {cut}", at, {"N": n}))
        for part, row in (("k", G), ("v", G + 1)):
            layer.append(Weight(f"{fused}.{suffix}", f"attn.{part}.{leaf}", f"{rows} -> K {cut}", {"R": row}))
    layer += [
        *names.layer_norm("ln_attn" if cfg.two_norms else "input_layernorm", "attn_norm"),
        *names.layer_norm("ln_mlp", "mlp_norm"),
        *names.heads_out("self_attention.dense", "attn.o"),
        *names.linear("mlp.dense_h_to_4h", "mlp.up"),
        *names.linear("mlp.dense_4h_to_h", "mlp.down"),
    ]
    return names.decoder_table(layer, model="transformer", embed="word_embeddings", layers="h", norm="ln_f")


# fmt: off
_7B = Config(
    vocab=65_024, num_layers=32, dim=4544, mlp_dim=18_176, num_heads=71, num_kv_heads=1, head_dim=64,
    rope=Rope(64, max_length=2048),
)
_40B = replace(
    _7B, num_layers=60, dim=8192, mlp_dim=32_768, num_heads=128, num_kv_heads=8, grouped=True, two_norms=True,
)
PRESETS = {
    "falcon-7b": _7B,
    "falcon-40b": _40B,
    "falcon-180b": replace(_40B, num_layers=80, dim=14_848, mlp_dim=59_392, num_heads=232, tied=False),
}
# fmt: on

FAMILY = Family("falcon", Falcon, FIELDS, _table, PRESETS)
