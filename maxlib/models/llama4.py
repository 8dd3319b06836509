"""Llama 4 Scout and Maverick: local layers that rotate, global ones that do not, experts, images in (Meta AI 2025)."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _llama4_vision as sight
from maxlib.ops._rope import Llama3Scaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Ignore, Renamed, Table, Weight, names, rope_to_hf, written

Vision = sight.Vision

LOCAL, GLOBAL = "chunked_attention", "full_attention"

# Our fields, theirs, and what a config means by leaving one out.
TEXT = {
    "vocab": ("vocab_size", 202_048),
    "num_layers": ("num_hidden_layers", 48),
    "dim": ("hidden_size", 5120),
    "mlp_dim": ("intermediate_size_mlp", 16_384),
    "expert_dim": ("intermediate_size", 8192),
    "num_heads": ("num_attention_heads", 40),
    "num_kv_heads": ("num_key_value_heads", 8),
    "head_dim": ("head_dim", 128),
    "chunk": ("attention_chunk_size", 8192),
    "num_experts": ("num_local_experts", 16),
    "top_k": ("num_experts_per_tok", 1),
    "moe_every": ("interleave_moe_layer_step", 1),
    "qk_norm": ("use_qk_norm", True),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
}


class Kind(NamedTuple):
    """What one layer is: what it sees (LOCAL or GLOBAL), whether it is rotated, and whether it has experts."""

    layer_type: str
    rotated: bool
    sparse: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Llama 4 from another; `PRESETS` has the published ones.

    kinds: what each layer is. None means that all but every fourth are rotated, that these see only their chunk of the
    text, and that every `moe_every`th has experts. losses: what the routers report for training.
    """

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    chunk: int
    num_experts: int
    top_k: int = 1
    moe_every: int = 1
    qk_norm: bool = True  # on rotated layers
    temperature: nn.TemperatureTuning | None = None  # on all others
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    kinds: tuple[Kind, ...] | None = None
    losses: tuple[Any, ...] = ()
    vision: Vision | None = None

    def __post_init__(self):
        if (found := len(self.layers)) != self.num_layers:
            raise ValueError(
                f"kinds (no_rope_layers) must say what each of the {self.num_layers} layers is, got {found}"
            )
        if self.qk_norm and self.rope.scaling is not None and self.rope.scaling.magnitude != 1:
            raise ValueError(f"with qk_norm (use_qk_norm) the rope must have magnitude 1, got {self.rope.scaling}")

    @property
    def layers(self) -> tuple[Kind, ...]:
        """`kinds`, or what None means."""
        numbers = range(1, self.num_layers + 1)
        usual = (Kind(LOCAL if n % 4 else GLOBAL, n % 4 != 0, n % self.moe_every == 0) for n in numbers)
        return tuple(usual) if self.kinds is None else self.kinds

    @property
    def masks(self) -> dict[str, ops.Mask]:
        return {LOCAL: ops.Causal() & ops.Chunked(self.chunk), GLOBAL: ops.Causal()}

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        if fields.require("model_type", "llama4_text", "llama4") == "llama4_text":
            return cls._from_text(fields)
        text = cls._from_text(fields.nested("text_config"))
        fields.ignore("tie_word_embeddings")  # the text's counts
        return dataclasses.replace(text, vision=Vision.from_hf(fields))

    @classmethod
    def _from_text(cls, fields: HFConfig) -> "Config":
        fields.require("model_type", "llama4_text")
        fields.require("hidden_act", "silu")
        fields.require("for_llm_compressor", False)  # experts of another shape, in some quantized files
        read = {ours: fields.take(theirs, default, nullable=True) for ours, (theirs, default) in TEXT.items()}
        read["num_kv_heads"] = read["num_kv_heads"] or read["num_heads"]
        read["head_dim"] = read["head_dim"] or read["dim"] // read["num_heads"]
        if nulls := [theirs for ours, (theirs, _) in TEXT.items() if read[ours] is None]:
            raise ValueError(f"config.json: {', '.join(nulls)} must not be null")
        tuning = nn.TemperatureTuning(fields.take("floor_scale", 8192), fields.take("attn_scale", 0.1))
        tuned = fields.take("attn_temperature_tuning", True, kind=object)  # the first releases had a number here
        defaults = {"default_theta": 500_000.0, "default_length": 131_072}
        rope = fields.rope(head_dim=read["head_dim"], interleaved=True, **defaults)
        cfg = cls(**read, rope=rope, temperature=tuning if tuned else None)
        kinds = _read_kinds(fields, cfg)
        return cfg if kinds == cfg.layers else dataclasses.replace(cfg, kinds=kinds)

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's Llama 4 does not have."""
        if self.vision is None:
            return {"architectures": ["Llama4ForCausalLM"], **self._text_to_hf()}
        return {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": self._text_to_hf(),
            "tie_word_embeddings": self.tied,
            **self.vision.to_hf(),
        }

    def _text_to_hf(self) -> dict[str, Any]:
        tuning = self.temperature or nn.TemperatureTuning(8192, 0.1)
        return {
            "model_type": "llama4_text",
            **written(self, TEXT),
            "hidden_act": "silu",
            "no_rope_layers": [int(kind.rotated) for kind in self.layers],  # sic: 1 is rotated
            "no_rope_layer_interval": 4,
            "layer_types": [kind.layer_type for kind in self.layers],
            "moe_layers": [i for i, kind in enumerate(self.layers) if kind.sparse],
            "attn_temperature_tuning": self.temperature is not None,
            "floor_scale": tuning.floor,
            "attn_scale": tuning.scale,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True, interleaved=True),
        }


def _read_kinds(fields: HFConfig, cfg: Config) -> tuple[Kind, ...]:
    """What config.json says of single layers; each of the three lists may be left out."""
    every, layers = fields.take("no_rope_layer_interval", 4), range(cfg.num_layers)
    rotated = fields.take("no_rope_layers", [], kind=list)[: cfg.num_layers] or [(i + 1) % every for i in layers]
    types = fields.layer_types(cfg.num_layers, LOCAL, GLOBAL) or [LOCAL if turned else GLOBAL for turned in rotated]
    sparse = fields.take("moe_layers", [i for i in layers if cfg.layers[i].sparse], kind=list)
    return tuple(Kind(kind, bool(turned), i in sparse) for i, kind, turned in zip(layers, types, rotated, strict=False))


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.SigmoidInputRouter(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.expert_dim, rngs=rngs)
    parts = {"router": router, "shared": shared, "losses": cfg.losses}
    return nn.MoE(cfg.dim, cfg.expert_dim, **parts, layout="EIO", rngs=rngs)  # as they lie in files


class Block(nnx.Module):
    def __init__(self, cfg: Config, kind: Kind, *, rngs: nnx.Rngs):
        # Having no weight, it may stand before the rotation, which changes no length.
        norm = nn.UnitRMSNorm(cfg.norm_eps) if cfg.qk_norm and kind.rotated else None
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=cfg.masks[kind.layer_type],
            rope=cfg.rope if kind.rotated else None,
            q_norm=norm,
            k_norm=norm,
            temperature=None if kind.rotated else cfg.temperature,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = None if kind.sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if kind.sparse else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Llama4(nn.VisionDecoder):
    """A decoder, `docs/decisions/0001`, which sees images if `cfg.vision` is given."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(cfg.masks.values()), (cfg.rope,)
        kinds = cfg.layers
        make = lambda i, rngs: Block(cfg, kinds[i], rngs=rngs)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(kinds), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else cfg.vision.tower(rngs)
        self.projector = None if cfg.vision is None else cfg.vision.projector(cfg.dim, rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names; those of a model that sees have a prefix, and one without `vision` reads their text."""
    experts, halves = "feed_forward.experts.", "E D (two F) -> E D F"
    layer = [
        *names.NORMS,
        *names.ATTENTION,
        Weight("feed_forward.router.weight", "moe.router.gate.w"),
        Weight(experts + "gate_up_proj", "moe.gate.w", halves, at={"two": 0}),
        Weight(experts + "gate_up_proj", "moe.up.w", halves, at={"two": 1}),
        Weight(experts + "down_proj", "moe.down.w"),
    ]
    for part in ("gate", "up", "down"):
        layer.append(Weight(f"feed_forward.{part}_proj.weight", f"mlp.{part}.w"))
        layer.append(Weight(f"feed_forward.shared_expert.{part}_proj.weight", f"moe.shared.{part}.w"))
    if cfg.vision is not None:
        return [*names.decoder_table(layer, prefix="language_model."), *sight.table()]
    blind = [Renamed("language_model.", ""), Ignore("vision_model.*"), Ignore("multi_modal_projector.*")]
    return [*names.decoder_table(layer), *blind]


# fmt: off
_SCOUT = Config(
    vocab=202_048, num_layers=48, dim=5120, mlp_dim=16_384, expert_dim=8192, num_heads=40, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 500_000.0, Llama3Scaling(16.0, 1.0, 1.0, 8192), interleaved=True, max_length=10_485_760),
    chunk=8192, num_experts=16, temperature=nn.TemperatureTuning(8192, 0.1), vision=Vision(),
)
PRESETS = {
    "llama4-17b-16e": _SCOUT,
    "llama4-17b-128e": dataclasses.replace(
        _SCOUT, rope=Rope(128, 500_000.0, interleaved=True, max_length=1_048_576), num_experts=128, moe_every=2,
        qk_norm=False,
    ),
}
# fmt: on

FAMILY = Family(
    name="llama4", model_types=("llama4_text", "llama4"), model=Llama4, config=Config, table=_table, presets=PRESETS
)
