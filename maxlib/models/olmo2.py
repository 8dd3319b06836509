"""OLMo 2 and 3 (OLMo team 2024, arXiv:2501.00656; 2025): norms after attention and MLP, and over all heads of
queries and keys.
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import TextDecoder, attention
from maxlib.models._sizes import DECODER, FULL, SLIDING, AttentionSizes
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Family, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of an OLMo; `PRESETS` has the published ones. With a window it is an OLMo 3."""

    mlp_dim: int
    rope: Rope  # without its scaling on sliding layers
    window: int | None = None  # of the sliding layers
    # FULL or SLIDING for each layer; None: every fourth is FULL, and without a window all are.
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False

    def __post_init__(self):
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}")
        if self.layer_types is not None and self.window is None:
            raise ValueError("layer_types are those of OLMo 3, which needs a window, got none")

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or SLIDING for each layer."""
        return self.layer_types or _pattern(self.num_layers, 1 if self.window is None else 4)

    @property
    def kinds(self) -> dict[str, tuple[ops.Mask, Rope]]:
        """The mask and the rotation of each type of layer."""
        full: dict[str, tuple[ops.Mask, Rope]] = {FULL: (ops.Causal(), self.rope)}
        if self.window is None:
            return full
        # A window never reaches beyond the lengths of pretraining, so its positions need no scaling.
        window, near = ops.Causal() & ops.SlidingWindow(self.window), replace(self.rope, scaling=None)
        return full | {SLIDING: (window, near)}


class Block(nn.Layer):
    """Post-norm inside the residual: `x + norm(branch(x))`, so that the stream itself is never normed."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn = attention(
            cfg, mask=mask, rope=rope, qk_norm=True, across_heads=True, bias=bias, out_bias=bias, rngs=rngs
        )
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(x, ctx, cache)
        x = nn.residual(x, h, "attn", norm=self.attn_norm)
        return nn.residual(x, self.mlp(x), "mlp", norm=self.mlp_norm), cache, {}


def _pattern(num_layers: int, period: int) -> tuple[str, ...]:
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))


class OLMo2(TextDecoder):
    """OLMo 2 and 3: norms moved behind the branches for stable training; in OLMo 3 three layers of four slide."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *cfg.kinds[kind], rngs=rngs), cfg.types, rngs=rngs)


def _is_3(c: Any) -> bool:
    return c.model_type == "olmo3"


def _read_layer_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    types = hf.layer_types(c.num_layers, FULL, SLIDING) if _is_3(c) else None
    return None if types == _pattern(c.num_layers, 4) else types


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    """Returns the rope of full layers. Raises ValueError if OLMo 3's for sliding ones is not that without scaling."""
    if not _is_3(c):
        return fields.read_rope(hf, head_dim=c.head_dim)
    parameters = hf.take("rope_parameters", None, kind=dict)
    if parameters and not {FULL, SLIDING} <= parameters.keys():
        raise ValueError(
            f"config.json: rope_parameters must describe {FULL} and {SLIDING} apart, got {', '.join(parameters)}: "
            "which layers are scaled differs between the versions of transformers that write one for both."
        )
    far = fields.read_rope(hf, head_dim=c.head_dim, default_theta=500_000.0, layer_type=FULL)
    near = fields.read_rope(hf, head_dim=c.head_dim, default_theta=500_000.0, layer_type=SLIDING, scaling_field=None)
    if near.theta != far.theta or near.scaling is not None:
        raise ValueError(
            f"config.json: rope_parameters.{SLIDING} must be as {FULL} without its scaling, got {near} and {far}: "
            "this architecture computes nothing else."
        )
    return far


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    written = fields.write_rope(rope, head_dim=cfg.head_dim, whole_heads=True)
    near = {"rope_type": "default", "rope_theta": rope.theta}
    apart = {"rope_parameters": {FULL: written["rope_parameters"], SLIDING: near}}
    return written if cfg.window is None else written | apart


FIELDS = Fields(
    Config,
    [
        *DECODER,
        Computed("rope", _read_rope, _write_rope),
        Computed(
            "window",
            lambda hf, c: hf.take("sliding_window", 4096) if _is_3(c) else None,
            lambda window, cfg: {} if window is None else {"sliding_window": window},
        ),
        Computed(
            "layer_types",
            _read_layer_types,
            lambda value, cfg: {} if cfg.window is None else {"layer_types": [*cfg.types]},
        ),
        fields.ATTENTION_BIAS,
    ],
    model_types={"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"},
    model_type=lambda cfg: "olmo2" if cfg.window is None else "olmo3",
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads, "norm_eps": 1e-5},
)


def _table(cfg: Config) -> Table:
    norms = names.norms(attn_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
    return names.decoder_table([*names.ATTENTION, *names.MLP, *norms])


# fmt: off
_7B = Config(
    vocab=100_352, num_layers=32, dim=4096, mlp_dim=11_008, num_heads=32, num_kv_heads=32, head_dim=128,
    rope=Rope(128, 500_000.0, max_length=4096),
)
_32B = dict(num_layers=64, dim=5120, mlp_dim=27_648, num_heads=40, num_kv_heads=8)
_LONG = Rope(128, 500_000.0, YarnScaling(8.0, 8192, attention_factor=1.2079441541679836), max_length=65_536)
_OLMO3 = replace(_7B, vocab=100_278, window=4096, rope=_LONG)
PRESETS = {
    "olmo2-1b": replace(_7B, num_layers=16, dim=2048, mlp_dim=8192, num_heads=16, num_kv_heads=16),
    "olmo2-7b": _7B,
    "olmo2-13b": replace(_7B, num_layers=40, dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40),
    "olmo2-32b": replace(_7B, **_32B),
    "olmo3-7b-pt": replace(_OLMO3, rope=Rope(128, 500_000.0, max_length=8192)),  # pretrained, before the long texts
    "olmo3-7b": _OLMO3,
    "olmo3-32b": replace(_OLMO3, **_32B),
}
# fmt: on

FAMILY = Family("olmo2", OLMo2, FIELDS, _table, PRESETS)
