"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): three layers of Kimi delta attention, then one of latent attention
without positions, with DeepSeek V3's experts.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _sizes as sizes
from maxlib.models._layers import PreNorm, TextDecoder, deepseek_experts, kimi_delta_attention, latent_attention
from maxlib.models._sizes import ExpertSizes, KimiDeltaSizes, LatentSizes, mixtral_experts
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Renamed, Table, Weight, fields, names

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ExpertSizes, KimiDeltaSizes, LatentSizes):
    """Sizes of a Kimi Linear; `PRESETS` has the published one."""

    # LINEAR or FULL for each layer; None: every fourth and the last are FULL.
    layer_types: tuple[str, ...] | None = None
    q_rank: int | None = None  # None: queries have no latent
    shared_dim: int  # of each key, the part that heads share; it is not rotated
    norm_eps: float = 1e-5
    max_length: int = 1_048_576

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def kinds(self) -> list[tuple[str, bool]]:
        """The type of each layer, and whether it has a plain MLP."""
        return list(zip(self.layer_types or _pattern(self.num_layers), self.dense, strict=True))


class Block(PreNorm):
    """Pre-norm layer of linear or latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, kind: str, dense: bool, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        # The cache keeps one latent [B, T, R] per token, R = 512 for all heads, and one key of 64. Only the states of
        # other layers know the order of tokens.
        attend = kind == FULL
        self.attn: Any = latent_attention(cfg, rope=None, shared_dim=cfg.shared_dim, rngs=rngs) if attend else None
        self.delta: Any = None if attend else kimi_delta_attention(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


def _pattern(num_layers: int) -> tuple[str, ...]:
    # Every fourth attends, and the last one.
    return tuple(FULL if (i + 1) % 4 == 0 or i + 1 == num_layers else LINEAR for i in range(num_layers))


class KimiLinear(TextDecoder):
    """Kimi Linear: 48B parameters, 3B active; every fourth layer has a cache."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)

    @property
    def max_length(self) -> int:
        """Number of positions that the model was made for."""
        return self.cfg.max_length


NESTED = "linear_attn_config"  # where the release has the sizes of linear attention


def _numbers(types: tuple[str, ...]) -> dict[str, Any]:
    full = [i + 1 for i, kind in enumerate(types) if kind == FULL]
    linear = [i + 1 for i, kind in enumerate(types) if kind == LINEAR]
    return {f"{NESTED}.full_attn_layers": full, f"{NESTED}.kda_layers": linear}


def _linear(name: str, hf_name: str, in_release: str, usual: int) -> Computed:
    """Makes the entry for a size of linear attention, which the release has in an object of its own."""

    def read(hf: HFConfig, c: Any) -> int:
        value = hf.take(hf_name, usual)
        return hf.nested(NESTED).take(in_release, value) if NESTED in hf else value

    return Computed(name, read, lambda value, cfg: {hf_name: value, f"{NESTED}.{in_release}": value})


def _numbered(hf: HFConfig, c: Any) -> tuple[str, ...]:
    """Reads the types of layers from the release's two lists of their numbers, which count from 1."""
    if NESTED not in hf:  # transformers' own default, which counts from 0
        return tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(c.num_layers))
    full, linear = (hf.nested(NESTED).take(name, kind=list) for name in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *linear]) != list(range(1, c.num_layers + 1)):
        raise ValueError(
            f"{hf.where(NESTED)}: full_attn_layers and kda_layers must name each of the layers 1 to {c.num_layers} "
            f"once, got {full} and {linear}"
        )
    return tuple(FULL if i + 1 in full else LINEAR for i in range(c.num_layers))


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "num_hidden_layers"),
        fields.num_dense(),
        fields.layer_types(LINEAR, FULL, usual=lambda c: _pattern(c.num_layers), absent=_numbered, also=_numbers),
        Field("dim", "hidden_size"),
        fields.MLP,
        Field("expert_dim", "moe_intermediate_size"),
        *fields.MLA,
        Field("shared_dim", "qk_rope_head_dim"),
        _linear("delta_heads", "linear_num_heads", "num_heads", 32),
        _linear("delta_dim", "linear_head_dim", "head_dim", 128),
        _linear("conv_width", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        Field("num_experts"),
        Field("num_shared", "num_shared_experts"),
        Field("top_k", "num_experts_per_token"),
        Field("num_groups", "num_expert_group"),
        Field("top_groups", "topk_group"),
        Field("renormalize", "moe_renormalize"),
        Field("routed_scale", "routed_scaling_factor"),
        Field("norm_eps", "rms_norm_eps"),
        Field("max_length", "model_max_length"),
    ],
    model_types={"kimi_linear": "KimiLinearForCausalLM"},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": fields.num_heads,
    },
    fixed_if_present={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0},
    # Nothing is rotated; heads have the widths of `qk_nope_head_dim` and so on; with one group the choice is the same.
    ignored=("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim", "use_grouped_topk"),
    absent={"num_shared": 1, "routed_scale": 2.446},
)


def _table(cfg: Config) -> Table:
    moe = "block_sparse_moe"
    router = [
        Weight(f"{moe}.gate.weight", "moe.router.gate.w"),
        Weight(f"{moe}.gate.e_score_correction_bias", "moe.router.expert_bias"),
    ]
    # transformers writes the MLP of dense layers under the name of the experts.
    also = [
        Renamed(f"model.layers.{i}.{moe}.{part}_proj.", f"model.layers.{i}.mlp.{part}_proj.")
        for i in range(cfg.num_dense)
        for part in ("gate", "up", "down")
    ]
    layer = [
        *names.NORMS,
        *names.mla(cfg.q_rank, cfg.nope_dim),
        *sizes.kimi_delta_attention("one two N three -> N", {"one": 0, "two": 0, "three": 0}),
        *names.MLP,
        *router,
        *mixtral_experts(moe),
        *names.mlp(f"{moe}.shared_experts.{{}}_proj", "moe.shared"),
    ]
    return [*also, *names.decoder_table(layer)]


# fmt: off
PRESETS = {
    "kimi-linear-48b-a3b": Config(
        vocab=163_840, num_layers=27, num_dense=1, dim=2304, mlp_dim=9216, expert_dim=1024, num_heads=32, q_rank=None,
        kv_rank=512, nope_dim=128, shared_dim=64, v_dim=128, delta_heads=32, delta_dim=128, conv_width=4,
        num_experts=256, num_shared=1, top_k=8, routed_scale=2.446,
    ),
}
# fmt: on

FAMILY = Family("kimi_linear", KimiLinear, FIELDS, _table, PRESETS)
