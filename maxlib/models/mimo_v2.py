"""MiMo-V2-Flash (Xiaomi 2025, arXiv:2601.02780): narrow windows with sinks, full attention in every
sixth layer, small experts.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, sigmoid_router
from maxlib.models._sizes import FULL, SLIDING, AttentionSizes, RouterSizes, causal
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, RouterSizes):
    """Sizes of a MiMo-V2; `PRESETS` has the published ones."""

    num_dense: int  # number of first layers with a plain MLP
    mlp_dim: int
    num_kv_heads: int  # of full layers; sliding ones have twice as many
    v_dim: int
    v_scale: float = 0.707
    local_rope: Rope
    window: int = 129
    # FULL or SLIDING for each layer; None: the first and every sixth are FULL.
    layer_types: tuple[str, ...] | None = None
    norm_eps: float = 1e-5
    attention_bias: bool = False

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.rope.dim != self.local_rope.dim:
            raise ValueError(
                f"rope and local_rope must turn equal parts of a head (partial_rotary_factor), got {self.rope.dim} and "
                f"{self.local_rope.dim} dimensions"
            )

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """FULL or SLIDING, and dense or not, for each layer."""
        types = self.layer_types or _usual_types(self)
        return tuple((kind, i < self.num_dense) for i, kind in enumerate(types))


class Block(PreNorm):
    """Llama's layer with keys wider than values; a window comes with sinks, twice the key heads and its own rope."""

    def __init__(self, cfg: Config, kind: str, dense: bool, *, rngs: nnx.Rngs):
        D, slides = cfg.dim, kind == SLIDING
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = Attention(
            D,
            num_heads=cfg.num_heads,
            num_kv_heads=2 * cfg.num_kv_heads if slides else cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            v_dim=cfg.v_dim,
            v_scale=cfg.v_scale,
            mask=causal(cfg.window if slides else None),
            rope=cfg.local_rope if slides else cfg.rope,
            sinks=slides,
            bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)


def _usual_types(c: Any) -> tuple[str, ...]:
    return tuple(SLIDING if i and (i + 1) % 6 else FULL for i in range(c.num_layers))


class Attention(nn.Attention):
    """Attention whose values are multiplied by `v_scale`."""

    def __init__(self, dim: int, *, v_scale: float, **options: Any):
        super().__init__(dim, **options)
        self.v_scale = v_scale

    def project(self, x: Float[Array, "B T D"], ctx: nn.Context) -> tuple[Array, Array, Array]:
        """Returns queries, keys and scaled values."""
        q, k, v = super().project(x, ctx)
        return q, k, self.v_scale * v


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = sigmoid_router(cfg.dim, cfg, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class MiMoV2(TextDecoder):
    """MiMo-V2: five layers of six attend to 129 tokens, so the cache of a long text is small."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)


def _by_pattern(hf: HFConfig, c: Any) -> tuple[str, ...]:
    """Reads the layers of the release's config: 1 has a window."""
    pattern = hf.take("hybrid_layer_pattern", None, kind=list)
    if pattern is None:
        return _usual_types(c)
    if len(pattern) != c.num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"{hf.where('hybrid_layer_pattern')} must give 0 or 1 for each of the {c.num_layers} layers "
            f"(num_hidden_layers), got {pattern}."
        )
    return tuple(SLIDING if windowed else FULL for windowed in pattern)


def _read_window(hf: HFConfig, c: Any) -> int:
    """Returns how many tokens a sliding layer sees, its own included; the release counts those before."""
    before, window = hf.take("sliding_window_size", None, kind=int), hf.take("sliding_window", 129)
    return window if before is None else before + 1


_ROPE = fields.rope(layer_type=FULL, partial=True, default_theta=5_000_000.0, default_fraction=0.334)


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    # transformers would take rope_scaling for the ropes of both types.
    return {name: value for name, value in _ROPE.write(rope, cfg).items() if name != "rope_scaling"}


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.num_dense(),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.ATTENTION,
        Field("v_dim", "v_head_dim"),
        Field("v_scale", "attention_value_scale"),
        Computed("rope", _ROPE.read, _write_rope),
        fields.rope(
            "local_rope",
            layer_type=SLIDING,
            theta_field="swa_rope_theta",
            scaling_field=None,
            partial=True,
            default_fraction=0.334,
        ),
        Computed("window", _read_window, lambda window, cfg: {"sliding_window": window}),
        fields.layer_types(FULL, SLIDING, usual=_usual_types, absent=_by_pattern),
        *fields.GROUPS,
        fields.ATTENTION_BIAS,
    ],
    model_types={"mimo_v2_flash": "MiMoV2FlashForCausalLM"},
    fixed={
        "hidden_act": "silu",
        "swa_num_attention_heads": fields.num_heads,
        "swa_head_dim": lambda c: c.head_dim,
        "swa_v_head_dim": lambda c: c.v_dim,
        "layernorm_epsilon": lambda c: c.norm_eps,
    },
    fixed_if_present={
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": (None, 0),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "swa_num_key_value_heads": lambda c: 2 * c.num_kv_heads,
        "moe_layer_freq": lambda c: [int(i >= c.num_dense) for i in range(c.num_layers)],
    },
    ignored=("attention_chunk_size",),  # nothing reads it
    absent={"num_kv_heads": 4, "head_dim": 192, "v_dim": 128},
    null={"v_scale": 1.0},
)


def _table(cfg: Config) -> Table:
    sinks = Weight("self_attn.attention_sink_bias", "attn.sinks")
    layer = [*names.NORMS, *names.ATTENTION, sinks, *names.MLP, *names.MOE]
    return [*names.decoder_table(layer), Ignore("model.mtp.*")]  # three modules that look ahead


# fmt: off
PRESETS = {
    "mimo-v2-flash": Config(
        vocab=152_576, num_layers=48, num_dense=1, dim=4096, mlp_dim=16_384, expert_dim=2048, num_heads=64,
        num_kv_heads=4, head_dim=192, v_dim=128, rope=Rope(64, 5_000_000.0, max_length=262_144),
        local_rope=Rope(64, 10_000.0, max_length=262_144), num_experts=256, top_k=8,
    )
}
# fmt: on

FAMILY = Family("mimo_v2", MiMoV2, FIELDS, _table, PRESETS)
