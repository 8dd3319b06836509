"""OLMo Hybrid (Ai2 2026): three layers of gated DeltaNet with negative eigenvalues, then one of OLMo 3's attention."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, delta_net
from maxlib.models._sizes import DeltaSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Renamed, Table, Weight, fields, names

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(DeltaSizes):
    """Sizes of an OLMo Hybrid; `PRESETS` has the published one."""

    mlp_dim: int
    num_kv_heads: int
    max_length: int
    rope: Rope | None = None
    turns: bool = True  # whether a step may be greater than 1
    # LINEAR or FULL for each layer; None: every fourth is FULL.
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def head_dim(self) -> int:
        """Width of a head of attention."""
        return self.dim // self.num_heads

    @property
    def types(self) -> tuple[str, ...]:
        """LINEAR or FULL for each layer."""
        return self.layer_types or _pattern(self.num_layers)


class Block(PreNorm):
    """Gated DeltaNet with norms before the branches, or OLMo 3's layer, whose norms follow them and span all heads."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = (
            delta_net(cfg, max_step=2.0 if cfg.turns else 1.0, norm_eps=1e-5, rngs=rngs) if kind == LINEAR else None
        )
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        if kind == LINEAR:
            self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
            self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        else:
            self.attn_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
            self.mlp_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    N, K, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    return nn.Attention(
        cfg.dim,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        rope=cfg.rope,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        q_norm=nn.norm.HeadsRMSNorm(N * H, eps=cfg.norm_eps),  # a scale for every dimension of every head
        k_norm=nn.norm.HeadsRMSNorm(K * H, eps=cfg.norm_eps),
        rngs=rngs,
    )


def _pattern(num_layers: int) -> tuple[str, ...]:
    types = [LINEAR if (i + 1) % 4 else FULL for i in range(num_layers)]
    return tuple(types) if FULL in types else (*types[:-1], FULL)  # at least one attends


class OLMoHybrid(TextDecoder):
    """OLMo Hybrid: only the recurrent states encode the order of tokens; attention has no positions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.types, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope | None:
    # The release has null for the base: nothing is rotated. Without one it is 10,000.
    where = hf if hf.take("rope_parameters", None, kind=dict) is None else hf.nested("rope_parameters")
    if "rope_theta" in where and where.take("rope_theta", None, kind=float, nullable=True) is None:
        where.ignore("rope_type")
        return None
    return fields.read_rope(hf, head_dim=c.dim // c.num_heads, default_length=c.max_length)


def _write_rope(rope: Rope | None, cfg: Any) -> dict[str, Any]:
    if rope is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return fields.write_rope(rope, head_dim=cfg.head_dim) | {"max_position_embeddings": cfg.max_length}


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.HEADS,
        Field("max_length", "max_position_embeddings"),
        Computed("rope", _read_rope, _write_rope),
        *fields.LINEAR_ATTENTION,
        Field("turns", "linear_allow_neg_eigval"),
        fields.layer_types(LINEAR, FULL, usual=lambda c: _pattern(c.num_layers)),
        fields.ATTENTION_BIAS,
    ],
    model_types={"olmo_hybrid": "OlmoHybridForCausalLM"},
    fixed={"hidden_act": "silu"},
    # How rates and steps are drawn.
    ignored=tuple(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
    absent={
        "num_kv_heads": fields.num_heads,
        "max_length": 65_536,
        "num_key_heads": fields.num_heads,
        "num_value_heads": fields.num_heads,
        "key_dim": lambda c: int(0.75 * c.dim / c.num_key_heads),
        "value_dim": lambda c: 2 * c.key_dim,
    },
)


def _delta_weights() -> list[Weight]:
    """Lists the weights of gated DeltaNet; files have one convolution for each of queries, keys and values."""
    table = [Weight(f"linear_attn.{name}", f"delta.{name.lower()}") for name in ("A_log", "dt_bias")]
    for part in "qkv":
        table.append(
            Weight(f"linear_attn.{part}_conv1d.weight", f"delta.{part}_conv", "(N H) one W -> N H W", {"one": 0})
        )
    for hf_name, part in {"q": "q", "k": "k", "v": "v", "g": "gate"}.items():
        table.append(Weight(f"linear_attn.{hf_name}_proj.weight", f"delta.{part}.w", "(N H) D -> N H D"))
    table += [Weight(f"linear_attn.{part}_proj.weight", f"delta.{part}.w") for part in "ab"]
    table += [Weight("linear_attn.o_norm.weight", "delta.norm.scale")]
    return [*table, Weight("linear_attn.o_proj.weight", "delta.o.w", "D (N H) -> D N H")]


def _table(cfg: Config) -> Table:
    norms = [
        *names.norms(attn_norm="attention_layer_norm", mlp_post_norm="post_feedforward_layernorm"),
        # The norm before the MLP where it has one, else the one behind attention: transformers writes both so.
        *names.norms(mlp_norm="feedforward_layer_norm", attn_post_norm="feedforward_layer_norm"),
    ]
    spellings = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    also = [
        Renamed(f"model.layers.{i}.{hf_name}.", f"model.layers.{i}.{to}.")
        for i in range(cfg.num_layers)
        for hf_name, to in spellings.items()
    ]
    return [*also, *names.decoder_table([*norms, *names.MLP, *names.ATTENTION, *_delta_weights()])]


# fmt: off
PRESETS = {
    "olmo-hybrid-7b": Config(
        vocab=100_352, num_layers=32, dim=3840, mlp_dim=11_008, num_heads=30, num_kv_heads=30, max_length=65_536,
        num_key_heads=30, num_value_heads=30, key_dim=96, value_dim=192,
    ),
}
# fmt: on

FAMILY = Family("olmo_hybrid", OLMoHybrid, FIELDS, _table, PRESETS)
