"""StableLM 3B and StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834): Llama's MLP, LayerNorm, a quarter of each head
rotated; in the largest model attention and MLP read one norm.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import Parallel, PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a StableLM; `PRESETS` has the published ones."""

    mlp_dim: int
    parallel: bool = False  # attention and MLP read one norm
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Llama's layer with LayerNorm."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class ParallelBlock(Parallel):
    """`x + attn(h) + mlp(h)`, where `h` is the layer norm of `x`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    N, K, H, eps = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.norm_eps
    return attention(
        cfg,
        rope=cfg.rope,
        q_norm=nn.norm.HeadsLayerNorm(N, H, eps=eps) if cfg.qk_norm else None,
        k_norm=nn.norm.HeadsLayerNorm(K, H, axis="kv_heads", eps=eps) if cfg.qk_norm else None,
        bias=cfg.qkv_bias,
        rngs=rngs,
    )


class StableLM(TextDecoder):
    """StableLM: sequential layers in the small models, parallel ones in the largest."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        def block(_: Any, rngs: nnx.Rngs) -> nn.Layer:
            return ParallelBlock(cfg, rngs=rngs) if cfg.parallel else Block(cfg, rngs=rngs)

        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, block, cfg.num_layers, norm=norm, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_eps"),
        fields.MLP,
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(partial=True, default_fraction=0.25),
        Field("parallel", "use_parallel_residual"),
        Field("qk_norm", "qk_layernorm"),
        Field("qkv_bias", "use_qkv_bias"),
    ],
    model_types={"stablelm": "StableLmForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": 32},
)


def _table(cfg: Config) -> Table:
    # The norms of heads are stored one by one.
    attention = [entry for entry in names.ATTENTION if "_norm." not in entry.hf_name]
    head_norms = [
        Weight(f"self_attn.{part}_layernorm.norms.{{n}}.weight", f"attn.{part}_norm.scale", "H -> n H") for part in "qk"
    ]
    return names.decoder_table([*names.LAYER_NORMS, *attention, *head_norms, *names.MLP])


# fmt: off
_3B = Config(
    vocab=50_304, num_layers=32, dim=2560, mlp_dim=6912, num_heads=32, num_kv_heads=32, head_dim=80,
    rope=Rope(20, max_length=4096),
)
PRESETS = {
    "stablelm-3b-4e1t": _3B,
    "stablelm-2-1.6b": replace(
        _3B, vocab=100_352, num_layers=24, dim=2048, mlp_dim=5632, head_dim=64, rope=Rope(16, max_length=4096),
        qkv_bias=True,
    ),
    "stablelm-2-12b": replace(
        _3B, vocab=100_352, num_layers=40, dim=5120, mlp_dim=13_824, num_kv_heads=8, head_dim=160,
        rope=Rope(40, max_length=4096), parallel=True, qk_norm=True,
    ),
}
# fmt: on

FAMILY = Family("stablelm", StableLM, FIELDS, _table, PRESETS)
