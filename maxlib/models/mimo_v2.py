"""MiMo-V2-Flash (Xiaomi 2025, arXiv:2601.02780): narrow windows with sinks, full attention in every
sixth layer, small experts.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import (
    Family,
    HFConfig,
    Ignore,
    ModelConfig,
    Table,
    Weight,
    hf,
    hf_fields,
    hf_layer_types,
    hf_num_dense,
    hf_rope,
    names,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def _usual(c: Any) -> tuple[str, ...]:
    return tuple(SLIDING if i and (i + 1) % 6 else FULL for i in range(c.num_layers))


def _by_pattern(fields: HFConfig, c: Any) -> tuple[str, ...]:
    """Reads the layers of the release's config: 1 has a window."""
    pattern = fields.take("hybrid_layer_pattern", None, kind=list)
    if pattern is None:
        return _usual(c)
    if len(pattern) != c.num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"{fields.where('hybrid_layer_pattern')} must give 0 or 1 for each of the {c.num_layers} layers "
            f"(num_hidden_layers), got {pattern}."
        )
    return tuple(SLIDING if windowed else FULL for windowed in pattern)


def _read_window(fields: HFConfig, c: Any) -> int:
    """Returns how many tokens a sliding layer sees, its own included; the release counts those before."""
    before, window = fields.take("sliding_window_size", None, kind=int), fields.take("sliding_window", 129)
    return window if before is None else before + 1


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a MiMo-V2; `PRESETS` has the published ones."""

    model_types = ("mimo_v2_flash",)
    architecture = "MiMoV2FlashForCausalLM"
    fixed = {"hidden_act": "silu"}
    fixed_if_present = {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "mlp_bias": False,
        "n_shared_experts": (None, 0),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_qk_norm": False,
    }
    ignored = ("attention_chunk_size",)  # nothing reads it

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    num_dense: int = hf_num_dense()  # number of first layers with a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads", same=("swa_num_attention_heads",))
    num_kv_heads: int = hf("num_key_value_heads", absent=4)  # of full layers; sliding ones have twice as many
    head_dim: int = hf("head_dim", absent=192, same=("swa_head_dim",))
    v_dim: int = hf("v_head_dim", absent=128, same=("swa_v_head_dim",))
    v_scale: float = hf("attention_value_scale", 0.707, null=1.0)
    rope: Rope = hf_rope(layer_type=FULL, partial=True, default_theta=5_000_000.0, default_fraction=0.334)
    local_rope: Rope = hf_rope(
        layer_type=SLIDING, theta_field="swa_rope_theta", scaling_field=None, partial=True, default_fraction=0.334
    )
    window: int = hf_fields(_read_window, lambda window, cfg: {"sliding_window": window}, default=129)
    # FULL or SLIDING for each layer; None: the first and every sixth are FULL.
    layer_types: tuple[str, ...] | None = hf_layer_types(FULL, SLIDING, usual=_usual, absent=_by_pattern)
    num_experts: int = hf("n_routed_experts")
    top_k: int = hf("num_experts_per_tok")
    num_groups: int = hf("n_group", 1)
    top_groups: int = hf("topk_group", 1)
    renormalize: bool = hf("norm_topk_prob", True)
    routed_scale: float = hf("routed_scaling_factor", 1.0)
    norm_eps: float = hf("rms_norm_eps", 1e-5, same=("layernorm_epsilon",))
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", False)
    losses: tuple[Any, ...] = ()  # router losses for training

    def __post_init__(self):
        super().__post_init__()
        if self.rope.dim != self.local_rope.dim:
            raise ValueError(
                f"rope and local_rope must turn equal parts of a head (partial_rotary_factor), got {self.rope.dim} and "
                f"{self.local_rope.dim} dimensions"
            )

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        cfg = super().from_hf(fields)
        fields.require("swa_num_key_value_heads", 2 * cfg.num_kv_heads)
        fields.require("moe_layer_freq", [int(i >= cfg.num_dense) for i in range(cfg.num_layers)])
        return cfg

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        written = super().to_hf()
        del written["rope_scaling"]  # transformers would take it for the ropes of both types
        return written

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """FULL or SLIDING, and dense or not, for each layer."""
        types = self.layer_types or _usual(self)
        return tuple((kind, i < self.num_dense) for i, kind in enumerate(types))

    @property
    def attention(self) -> dict[str, dict[str, Any]]:
        """Returns the settings of the attention of each type of layer."""
        window, heads = ops.Causal() & ops.SlidingWindow(self.window), self.num_kv_heads
        return {
            FULL: {"mask": ops.Causal(), "rope": self.rope, "num_kv_heads": heads},
            SLIDING: {"mask": window, "rope": self.local_rope, "num_kv_heads": 2 * heads, "sinks": True},
        }


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
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Sigmoid scores; a bias on the choice of experts, but not on their weights, balances the load.
    choice: Any = dict(score=jax.nn.sigmoid, renormalize=cfg.renormalize, scale=cfg.routed_scale, expert_bias=True)
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, groups=groups, **choice, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class Block(nn.Layer):
    """Llama's layer with keys wider than values; a window comes with sinks, twice the key heads and its own rope."""

    def __init__(self, cfg: Config, kind: str, dense: bool, *, rngs: nnx.Rngs):
        D, of_kind = cfg.dim, cfg.attention[kind]
        heads: Any = dict(num_heads=cfg.num_heads, head_dim=cfg.head_dim, v_dim=cfg.v_dim, v_scale=cfg.v_scale)
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = Attention(D, **heads, **of_kind, bias=cfg.attention_bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux


class MiMoV2(nn.Decoder):
    """MiMo-V2: five layers of six attend to 129 tokens, so the cache of a long text is small."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = zip(*((a["mask"], a["rope"]) for a in cfg.attention.values()), strict=True)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


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

FAMILY = Family(name="mimo_v2", model=MiMoV2, config=Config, table=_table, presets=PRESETS)
