"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373): attention and MLP
read the same input, LayerNorm, biases everywhere, a quarter of each head rotated.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import TextDecoder
from maxlib.models._sizes import Sizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Renamed, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(Sizes):
    """Sizes of a GPT-NeoX; `PRESETS` has the published ones."""

    mlp_dim: int
    rope: Rope
    parallel: bool = True  # the MLP reads the layer's input, not the sum after attention
    exact_gelu: bool = True  # False: by tanh
    attention_bias: bool = True
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads


class Block(nn.Layer):
    """`x + attn(attn_norm(x)) + mlp(mlp_norm(x))`; one after the other if `parallel` is off."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            D, num_heads=cfg.num_heads, head_dim=cfg.head_dim, rope=cfg.rope, bias=bias, out_bias=bias, rngs=rngs
        )
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        act = nn.vision.exact_gelu if cfg.exact_gelu else jax.nn.gelu
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=act, rngs=rngs)
        self.parallel = cfg.parallel

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        after = nn.residual(x, h, "attn")
        read = x if self.parallel else after
        return nn.residual(after, self.mlp(self.mlp_norm(read)), "mlp"), cache, {}


class GPTNeoX(TextDecoder):
    """GPT-NeoX: both branches of a layer at once, which saves a norm's wait and, over devices, one all-reduce."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    """Also under the names of transformers 4, `rotary_emb_base` and `rotary_pct`."""
    theta, fraction = hf.take("rotary_emb_base", 10_000.0, kind=float), hf.take("rotary_pct", 0.25, kind=float)
    return fields.read_rope(
        hf, head_dim=fields.equal_heads(c), partial=True, default_theta=theta, default_fraction=fraction
    )


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    written = fields.write_rope(rope, head_dim=cfg.head_dim)
    fraction = written.setdefault("partial_rotary_factor", 1.0)
    return written | {"rotary_emb_base": written["rope_theta"], "rotary_pct": fraction}


def _read_exact_gelu(hf: HFConfig, c: Any) -> bool:
    # The last three are names of one formula.
    return hf.require("hidden_act", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh") == "gelu"


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_eps"),
        fields.MLP,
        Field("num_heads", "num_attention_heads"),
        Computed("rope", _read_rope, _write_rope),
        Field("parallel", "use_parallel_residual"),
        Computed("exact_gelu", _read_exact_gelu, lambda exact, cfg: {"hidden_act": "gelu" if exact else "gelu_fast"}),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gpt_neox": "GPTNeoXForCausalLM"},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.LAYER_NORMS,
        *names.qkv("attention.query_key_value", "attn", "(N three H)"),  # each head's are neighbours
        *names.heads_out("attention.dense", "attn.o"),
        *names.linear("mlp.dense_h_to_4h", "mlp.up"),
        *names.linear("mlp.dense_4h_to_h", "mlp.down"),
    ]
    return [
        *names.decoder_table(layer, model="gpt_neox", embed="embed_in", norm="final_layer_norm", head="embed_out"),
        Renamed("lm_head.", "embed_out."),  # as transformers 5 calls it in memory
        # Buffers of early releases: the causal mask and the frequencies.
        *[Ignore(f"gpt_neox.layers.{{i}}.attention.{name}") for name in ("bias", "masked_bias", "rotary_emb.inv_freq")],
    ]


def _pythia(num_layers: int, dim: int, num_heads: int, *, vocab: int = 50_304) -> Config:
    rope = Rope(dim // num_heads // 4, max_length=2048)
    return Config(
        vocab=vocab, num_layers=num_layers, dim=dim, mlp_dim=4 * dim, num_heads=num_heads, rope=rope
    )  # fmt: skip


PRESETS = {
    "pythia-14m": _pythia(6, 128, 4),
    "pythia-31m": _pythia(6, 256, 8),
    "pythia-70m": _pythia(6, 512, 8),
    "pythia-160m": _pythia(12, 768, 12),
    "pythia-410m": _pythia(24, 1024, 16),
    "pythia-1b": _pythia(16, 2048, 8),
    "pythia-1.4b": _pythia(24, 2048, 16),
    "pythia-2.8b": _pythia(32, 2560, 32),
    "pythia-6.9b": _pythia(32, 4096, 32, vocab=50_432),
    "pythia-12b": _pythia(36, 5120, 40, vocab=50_688),
    "gpt-neox-20b": replace(_pythia(44, 6144, 64, vocab=50_432), exact_gelu=False),
}

FAMILY = Family("gpt_neox", GPTNeoX, FIELDS, _table, PRESETS)
