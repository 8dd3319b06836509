"""Nemotron 3 (NVIDIA 2025): each layer is one mixer, Mamba-2, attention, experts without gates, or an MLP."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import TextDecoder, sigmoid_router, squared_relu
from maxlib.models._sizes import RouterSizes
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Renamed, Table, Weight, fields, names

MAMBA, EXPERTS, FULL, MLP = "M", "E", "*", "-"
# Names of layers, of transformers 5 and before.
NAMES = {"linear_attention": MAMBA, "moe": EXPERTS, "full_attention": FULL, "mlp": MLP}
NAMES |= {"mamba": MAMBA, "attention": FULL}


@dataclass(frozen=True, kw_only=True)
class Config(RouterSizes):
    """Sizes of a Nemotron 3; `PRESETS` has the published ones."""

    pattern: str
    vocab: int = 131_072
    dim: int
    mlp_dim: int = 21_504  # of layers that are an MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    max_length: int
    mamba_heads: int
    mamba_head_dim: int = 64
    mamba_groups: int = 8
    mamba_state: int = 128
    mamba_bias: bool = False
    conv_width: int = 4
    conv_bias: bool = True
    dt_min: float = 0.001  # least step
    shared_dim: int
    latent_dim: int | None = None  # width that experts see; None: all of it
    norm_eps: float = 1e-5
    tied: ClassVar[bool] = False

    @property
    def num_layers(self) -> int:
        """Number of layers, each of which is one mixer."""
        return len(self.pattern)


class Block(nn.Layer):
    """One norm, one mixer, one residual: `x + mixer(norm(x))`."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.mamba: Any = _mamba(cfg, rngs=rngs) if kind == MAMBA else None
        self.moe: Any = _experts(cfg, rngs=rngs) if kind == EXPERTS else None
        self.mlp: Any = nn.MLP(cfg.dim, cfg.mlp_dim, act=squared_relu, bias=False, rngs=rngs) if kind == MLP else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, aux = self.norm(x), {}
        if mixer := self.attn or self.mamba:
            h, cache = mixer(h, ctx, cache)
        else:
            h, aux = (self.mlp(h), aux) if self.moe is None else self.moe(h, ctx)
        name = "mlp" if mixer is None else "attn"
        return nn.residual(x, h, name), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty cache: keys and values, a state, or nothing."""
        mixer = self.attn or self.mamba
        return () if mixer is None else mixer.init_cache(batch, capacity, dtype)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    return nn.Attention(
        cfg.dim, num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim, rngs=rngs
    )  # without positions


def _mamba(cfg: Config, *, rngs: nnx.Rngs) -> nn.Mamba2:
    return nn.Mamba2(
        cfg.dim,
        num_heads=cfg.mamba_heads,
        head_dim=cfg.mamba_head_dim,
        num_groups=cfg.mamba_groups,
        conv_width=cfg.conv_width,
        conv_bias=cfg.conv_bias,
        bias=cfg.mamba_bias,
        state_dim=cfg.mamba_state,
        dt_limit=(cfg.dt_min, float("inf")),
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = sigmoid_router(cfg.dim, cfg, rngs=rngs)
    shared = nn.MLP(cfg.dim, cfg.shared_dim, act=squared_relu, bias=False, rngs=rngs)
    return nn.MoE(
        cfg.dim,
        cfg.expert_dim,
        router=router,
        shared=shared,
        activation=squared_relu,
        gated=False,
        latent_dim=cfg.latent_dim,
        losses=cfg.losses,
        rngs=rngs,
    )


class NemotronH(TextDecoder):
    """Nemotron 3: similar numbers of Mamba and expert layers, and a few attention layers without positions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.pattern, rngs=rngs)


def _read_pattern(hf: HFConfig, c: Any) -> str:
    """Returns a letter for each layer, from a list of names or from the letters themselves."""
    number = hf.take("num_hidden_layers", None, kind=int, nullable=True)
    types, letters = (hf.take(name, None, kind=object) for name in ("layers_block_type", "hybrid_override_pattern"))
    known = "".join(NAMES.values())
    pattern = letters if types is None else [NAMES.get(kind, "?") for kind in types]
    if not pattern or not set(pattern) <= set(known) or number not in (None, len(pattern)):
        raise ValueError(
            f"{hf.where('layers_block_type')} (or hybrid_override_pattern) must name each of num_hidden_layers layers "
            f"by one of {', '.join(NAMES)}, or by M, E, * and -; got {types or letters!r} for {number} layers."
        )
    return "".join(pattern)


FIELDS = Fields(
    Config,
    [
        Computed(
            "pattern",
            _read_pattern,
            lambda letters, cfg: {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)},
        ),
        Field("vocab", "vocab_size"),
        Field("dim", "hidden_size"),
        fields.MLP,
        *fields.ATTENTION,
        Field("max_length", "max_position_embeddings"),
        Field("mamba_heads", "mamba_num_heads"),
        Field("mamba_head_dim"),
        Field("mamba_groups", "n_groups"),
        Field("mamba_state", "ssm_state_size"),
        Field("mamba_bias", "use_bias"),
        Field("conv_width", "conv_kernel"),
        Field("conv_bias", "use_conv_bias"),
        Field("dt_min", "time_step_min"),
        *fields.DEEPSEEK_EXPERTS,
        Field("shared_dim", "moe_shared_expert_intermediate_size"),
        Field("latent_dim", "moe_latent_size"),
        *fields.GROUPS,
        Field("norm_eps", "layer_norm_epsilon"),
    ],
    model_types={"nemotron_h": "NemotronHForCausalLM"},
    fixed={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    fixed_if_present={"residual_in_fp32": False, "n_shared_experts": 1},
    ignored=(
        # Of the algorithm and of training; time_step_min alone is a limit, in transformers too.
        *("chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "time_step_limit", "time_step_max"),
        # Said twice, or read by nothing: heads say how wide Mamba is, and nothing is rotated.
        *("expand", "mamba_proj_bias", "norm_eps", "rope_theta", "partial_rotary_factor"),
        # Multi-token prediction modules are not read.
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    ),
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (all mixers but one) is passed over.
    inner, groups = cfg.mamba_heads * cfg.mamba_head_dim, cfg.mamba_groups * cfg.mamba_state
    attention = names.attention("mixer.{}_proj", "attn", out="mixer.o_proj")
    layer = [Weight("norm.weight", "norm.scale"), *attention]
    layer += names.mamba2("mixer", "mamba", heads=cfg.mamba_heads, inner=inner, groups=groups)
    layer += [
        Weight("mixer.gate.weight", "moe.router.gate.w"),
        Weight("mixer.gate.e_score_correction_bias", "moe.router.expert_bias"),
        Weight("mixer.fc1_latent_proj.weight", "moe.enter.w"),
        Weight("mixer.fc2_latent_proj.weight", "moe.leave.w"),
    ]
    for part in ("up", "down"):
        layer += [
            Weight(f"mixer.{part}_proj.weight", f"mlp.{part}.w"),
            Weight(f"mixer.shared_experts.{part}_proj.weight", f"moe.shared.{part}.w"),
            Weight(f"mixer.experts.{{e}}.{part}_proj.weight", f"moe.{part}.w", "O I -> e O I"),
        ]
    return [
        Renamed("model.", "backbone."),
        *names.decoder_table(layer, model="backbone", embed="embeddings", norm="norm_f"),
        Ignore("mtp.*"),
    ]


# fmt: off
_NANO = Config(
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", dim=2688, mlp_dim=1856, num_heads=32, num_kv_heads=2,
    max_length=262_144, mamba_heads=64, num_experts=128, top_k=6, expert_dim=1856, shared_dim=3712, routed_scale=2.5,
)
PRESETS = {
    "nemotron-3-nano-30b-a3b": _NANO,
    "nemotron-3-super-120b-a12b": replace(
        _NANO, pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME", dim=4096, mlp_dim=2688,
        mamba_heads=128, num_experts=512, top_k=22, expert_dim=2688, shared_dim=5376, latent_dim=1024, routed_scale=5.0,
    ),
}
# fmt: on

FAMILY = Family("nemotron_h", NemotronH, FIELDS, _table, PRESETS)
