"""Command R, Aya and Command A (Cohere 2024 and 2025, arXiv:2504.00698): attention and MLP read one norm; in the later
models three layers of four slide, and only these have rotary positions.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import Parallel, TextDecoder, attention
from maxlib.models._sizes import FULL, SLIDING, RotatedWindowSizes, every
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(RotatedWindowSizes):
    """Sizes of a Cohere model; `PRESETS` has the published ones. With a window it is the second generation."""

    mlp_dim: int
    logit_scale: float = 0.0625
    qk_norm: bool = False
    attention_bias: bool = False
    norm_eps: float = 1e-5
    tied: bool = True


class Block(Parallel):
    """`x + attn(h) + mlp(h)`, where `h` is the layer norm of `x`, without a bias."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, rngs: nnx.Rngs):
        D, N, K, H, bias = cfg.dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.attention_bias
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps, bias=False)
        self.attn = attention(
            cfg,
            mask=mask,
            rope=rope,
            q_norm=nn.norm.HeadsLayerNorm(N, H, eps=cfg.norm_eps) if cfg.qk_norm else None,
            k_norm=nn.norm.HeadsLayerNorm(K, H, axis="kv_heads", eps=cfg.norm_eps) if cfg.qk_norm else None,
            bias=bias,
            out_bias=bias,
            rngs=rngs,
        )
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Cohere(TextDecoder):
    """Command R and A: parallel branches, one norm for each layer, scaled logits and a tied head."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=False)
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, norm=norm, rngs=rngs)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the scaled input of the head."""
        # Not in `logits`: the loss takes hidden states and `head_weight`, and makes no logits.
        return super().leave(x, ctx) * self.cfg.logit_scale


# transformers' default of the base differs between the generations.
_ROPES = {
    "cohere": fields.rope(interleaved=True, default_theta=500_000.0),
    "cohere2": fields.rope(interleaved=True),
}


def _has_window(c: Any) -> bool:
    return c.model_type == "cohere2"


def _read_layer_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    if not _has_window(c):
        return None
    implied = every(hf.take("sliding_window_pattern", 4), c.num_layers, SLIDING, FULL)
    types = hf.layer_types(c.num_layers, FULL, SLIDING) or implied
    return None if types == every(4, c.num_layers, SLIDING, FULL) else types


FIELDS = Fields(
    Config,
    [
        *fields.decoder("layer_norm_eps"),
        fields.MLP,
        *fields.HEADS,
        Computed("head_dim", lambda hf, c: hf.require("head_dim", fields.equal_heads(c)), lambda width, cfg: {}),
        Computed("rope", lambda hf, c: _ROPES[c.model_type].read(hf, c), _ROPES["cohere"].write),
        Field("logit_scale"),
        fields.only_if(_has_window, "window", "sliding_window", 4096),
        Computed(
            "layer_types",
            _read_layer_types,
            lambda value, cfg: {} if cfg.window is None else {"layer_types": [*cfg.types]},
        ),
        Computed(
            "qk_norm",
            lambda hf, c: hf.require("use_qk_norm", False) if _has_window(c) else hf.take("use_qk_norm", False),
            lambda value, cfg: {"use_qk_norm": value} if cfg.window is None else {},
        ),
        fields.ATTENTION_BIAS,
    ],
    model_types={"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"},
    model_type=lambda cfg: "cohere" if cfg.window is None else "cohere2",
    fixed={"hidden_act": "silu"},
    # In releases of the second generation; transformers reads none of them.
    fixed_if_present={
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    absent={"num_kv_heads": fields.num_heads},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([Weight("input_layernorm.weight", "attn_norm.scale"), *names.ATTENTION, *names.MLP])


# fmt: off
_R = Config(
    vocab=256_000, num_layers=40, dim=8192, mlp_dim=22_528, num_heads=64, num_kv_heads=64, head_dim=128,
    rope=Rope(128, 8_000_000.0, interleaved=True, max_length=8192),
)
_8B = replace(
    _R, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8,
    rope=Rope(128, 10_000.0, interleaved=True, max_length=8192),
)
_A_ROPE = Rope(128, 50_000.0, interleaved=True, max_length=131_072)
PRESETS = {
    "command-r-35b": _R,
    "command-r-plus-104b": replace(
        _R, num_layers=64, dim=12_288, mlp_dim=33_792, num_heads=96, num_kv_heads=8, qk_norm=True,
        logit_scale=0.8333333333333334, rope=Rope(128, 75_000_000.0, interleaved=True, max_length=8192),
    ),
    "aya-23-8b": _8B,
    "command-r7b": replace(
        _8B, window=4096, logit_scale=0.25, rope=replace(_A_ROPE, max_length=132_096),
    ),
    "command-a-111b": replace(
        _R, num_layers=64, dim=12_288, mlp_dim=36_864, num_heads=96, num_kv_heads=8, window=4096, logit_scale=0.25,
        rope=_A_ROPE,
    ),
}
# fmt: on

FAMILY = Family("cohere", Cohere, FIELDS, _table, PRESETS)
