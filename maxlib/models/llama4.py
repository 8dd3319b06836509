"""Llama 4 Scout and Maverick (Meta AI 2025): local layers with rotary positions, global ones without, experts, and
an image encoder.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flax import nnx

from maxlib import nn, ops
from maxlib.models import _llama4_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, SparseSizes
from maxlib.ops import Llama3Scaling, Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Renamed, Table, Weight, fields, names

Vision = vision.Vision
LOCAL, GLOBAL = "chunked_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of a Llama 4; `PRESETS` has the published ones. Multimodal checkpoints keep them in `text_config`."""

    mlp_dim: int
    chunk: int
    top_k: int = 1
    moe_every: int = 1
    qk_norm: bool = True  # on rotated layers
    temperature: nn.TemperatureTuning | None = None  # on all others
    norm_eps: float = 1e-5
    attention_bias: bool = False
    # None: all but every fourth are rotated, these see their chunk only, and every `moe_every`th has experts.
    kinds: tuple["Kind", ...] | None = None
    vision: Vision | None = None

    def __post_init__(self):
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"kinds (no_rope_layers) must say what each of the {self.num_layers} layers is, got {len(self.layers)}"
            )
        if self.qk_norm and self.rope.scaling is not None and self.rope.scaling.magnitude != 1:
            raise ValueError(f"with qk_norm (use_qk_norm) the rope must have magnitude 1, got {self.rope.scaling}")

    @property
    def layers(self) -> "tuple[Kind, ...]":
        """The kind of each layer."""
        return _usual_kinds(self) if self.kinds is None else self.kinds


class Block(PreNorm):
    """Llama's layer, rotated and local or neither, with experts or with an MLP."""

    def __init__(self, cfg: Config, kind: "Kind", *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        # Without a weight it can be applied before the rotation, which preserves norms.
        norm = nn.norm.UnitRMSNorm(cfg.norm_eps) if cfg.qk_norm and kind.rotated else None
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(
            cfg,
            mask=ops.Causal() & ops.Chunked(cfg.chunk) if kind.layer_type == LOCAL else ops.Causal(),
            rope=cfg.rope if kind.rotated else None,
            temperature=None if kind.rotated else cfg.temperature,
            q_norm=norm,
            k_norm=norm,
            bias=bias,
            out_bias=bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = None if kind.sparse else nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if kind.sparse else None


class Kind(NamedTuple):
    """The kind of a layer: LOCAL or GLOBAL, whether it is rotated, and whether it has experts."""

    layer_type: str
    rotated: bool
    sparse: bool


def _usual_kinds(cfg: Any) -> tuple[Kind, ...]:
    numbers = range(1, cfg.num_layers + 1)
    return tuple(Kind(LOCAL if n % 4 else GLOBAL, n % 4 != 0, n % cfg.moe_every == 0) for n in numbers)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # An expert's weight, sigmoid(score), scales its input instead of its output.
    router = nn.router.SigmoidInputRouter(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(
        cfg.dim,
        cfg.expert_dim,
        router=router,
        shared=shared,
        losses=cfg.losses,
        weight_order="EIO",  # as stored in files
        rngs=rngs,
    )


class Llama4(TextDecoder):
    """Llama 4: three layers of four attend within chunks of 8192 tokens, the fourth to all tokens without positions
    (iRoPE).

    With `cfg.vision` it reads images.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.layers, rngs=rngs)
        self.tower = None if cfg.vision is None else vision.Llama4Vision(cfg.vision, rngs=rngs)
        self.projector = None if cfg.vision is None else vision.ShuffleProjector(cfg.vision, cfg.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        encoder = self.cfg.vision
        if encoder is None:
            return {}
        images = nn.vision.ImageInput(
            self.tower, self.projector, token=encoder.image_token, num_tokens=encoder.num_tokens
        )
        return {"images": images}


def _read_kinds(hf: HFConfig, c: Any) -> tuple[Kind, ...] | None:
    """Reads what config.json says of single layers; each of the three lists may be left out."""
    every, layers, usual = hf.take("no_rope_layer_interval", 4), range(c.num_layers), _usual_kinds(c)
    rotated = hf.take("no_rope_layers", [], kind=list)[: c.num_layers] or [(i + 1) % every for i in layers]
    types = hf.layer_types(c.num_layers, LOCAL, GLOBAL) or [LOCAL if turned else GLOBAL for turned in rotated]
    sparse = hf.take("moe_layers", [i for i in layers if usual[i].sparse], kind=list)
    kinds = zip(layers, types, rotated, strict=False)
    kinds = tuple(Kind(kind, bool(turned), i in sparse) for i, kind, turned in kinds)
    return None if kinds == usual else kinds


def _write_kinds(kinds: tuple[Kind, ...] | None, cfg: Any) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(kind.rotated) for kind in cfg.layers],  # sic: 1 is rotated
        "no_rope_layer_interval": 4,
        "layer_types": [kind.layer_type for kind in cfg.layers],
        "moe_layers": [i for i, kind in enumerate(cfg.layers) if kind.sparse],
    }


def _read_temperature(hf: HFConfig, c: Any) -> nn.TemperatureTuning | None:
    tuning = nn.TemperatureTuning(hf.take("floor_scale", 8192), hf.take("attn_scale", 0.1))
    # The first releases had a number here.
    return tuning if hf.take("attn_temperature_tuning", True, kind=object) else None


def _write_temperature(value: nn.TemperatureTuning | None, cfg: Any) -> dict[str, Any]:
    tuning = value or nn.TemperatureTuning(8192, 0.1)
    return {"attn_temperature_tuning": value is not None, "floor_scale": tuning.floor, "attn_scale": tuning.scale}


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        Field("mlp_dim", "intermediate_size_mlp"),
        Field("expert_dim", "intermediate_size"),
        *fields.ATTENTION,
        fields.rope(interleaved=True, default_theta=500_000.0, default_length=131_072),
        Field("chunk", "attention_chunk_size"),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
        Field("moe_every", "interleave_moe_layer_step"),
        Field("qk_norm", "use_qk_norm"),
        Computed("temperature", _read_temperature, _write_temperature),
        fields.ATTENTION_BIAS,
        Computed("kinds", _read_kinds, _write_kinds),
    ],
    model_types={"llama4_text": "Llama4ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={"for_llm_compressor": False},  # experts of another shape, in some quantized files
    absent={
        "vocab": 202_048,
        "num_layers": 48,
        "dim": 5120,
        "mlp_dim": 16_384,
        "expert_dim": 8192,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "chunk": 8192,
        "num_experts": 16,
    },
    null={"chunk": fields.REQUIRED, "qk_norm": fields.REQUIRED},  # to transformers a null means that there is none
)
FIELDS = fields.Multimodal(
    TEXT,
    {"vision": vision.FIELDS},
    model_types={"llama4": "Llama4ForConditionalGeneration"},
    ignored=["tie_word_embeddings"],  # the text's counts
)


def _table(cfg: Config) -> Table:
    experts, halves = "feed_forward.experts.", "E D (two F) -> E D F"
    layer = [
        *names.NORMS,
        *names.ATTENTION,
        Weight("feed_forward.router.weight", "moe.router.gate.w"),
        Weight(experts + "gate_up_proj", "moe.gate.w", halves, at={"two": 0}),
        Weight(experts + "gate_up_proj", "moe.up.w", halves, at={"two": 1}),
        Weight(experts + "down_proj", "moe.down.w"),
        *names.mlp("feed_forward.{}_proj", "mlp"),
        *names.mlp("feed_forward.shared_expert.{}_proj", "moe.shared"),
    ]
    if cfg.vision is not None:
        return [*names.decoder_table(layer, prefix="language_model."), *vision.table()]
    # Without `vision` a model reads the text of one that sees.
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
    "llama4-17b-128e": replace(
        _SCOUT, rope=Rope(128, 500_000.0, interleaved=True, max_length=1_048_576), num_experts=128, moe_every=2,
        qk_norm=False,
    ),
}
# fmt: on

FAMILY = Family("llama4", Llama4, FIELDS, _table, PRESETS)
