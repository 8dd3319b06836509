"""Sizes of Gemma 4 (Google DeepMind 2026), how config.json spells them, and the names of weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxlib import ops
from maxlib.models import _gemma4_audio, _gemma4_vision
from maxlib.models._gemma4_audio import Audio, UnifiedAudio
from maxlib.models._gemma4_vision import UnifiedVision, Vision
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import ProportionalScaling, Rope
from maxlib.weights import Computed, Field, Fields, HFConfig, Ignore, Multimodal, Renamed, Table, Weight, fields, names

LOCAL, GLOBAL = "sliding_attention", "full_attention"
# A layer has its own keys, shares them with later layers, or takes those of the last layer that shares.
OWN, SHARES, TAKES = "own", "shares", "takes"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a Gemma 4; `PRESETS` has the published ones. Vision models have theirs in `text_config`."""

    mlp_dim: int
    num_kv_heads: int  # of local layers
    head_dim: int  # of local layers
    window: int  # of local layers
    # LOCAL or GLOBAL for each layer; None: every sixth is global, and the last.
    layer_types: tuple[str, ...] | None = None
    keys_as_values: bool = False  # in global layers
    global_heads: tuple[int, int]  # width and number of their key heads
    local_rope: Rope
    num_shared: int = 0  # last layers, which take keys and values of earlier ones
    shared_wide: bool = False  # their MLP is twice as wide
    per_layer_dim: int = 0  # of a token's vector for each layer; 0: none
    per_layer_vocab: int = 262_144
    sparse: bool = False  # experts beside the MLP
    num_experts: int | None = None
    top_k: int | None = None
    expert_dim: int | None = None
    final_softcap: float | None = 30.0
    tied: bool = True
    attention_bias: bool = False
    # Tokens of an image attend to each other in both directions, in local layers.
    both_ways: bool = False
    pad_token: int | None = 0  # whose vectors stand for placeholders of images and sound
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    vision: Vision | UnifiedVision | None = None
    audio: Audio | UnifiedAudio | None = None

    def __post_init__(self):
        fields.check_layer_types(self)
        for encoder in self.encoders:
            encoder.check(self)
        if self.types[-1] != GLOBAL:
            raise ValueError(f"layer_types must end with {GLOBAL}, got {self.types[-1]} for the last layer")
        self._check_shared()

    def _check_shared(self) -> None:
        """Raises ValueError unless the layers that take keys find some of their type; a drafter takes all of them."""
        left = self.types[: self.num_layers - self.num_shared]
        if not 0 <= self.num_shared < self.num_layers or {*left} != {*self.types}:
            raise ValueError(
                "num_shared (num_kv_shared_layers) must leave layers of each type, got "
                f"{self.num_shared} of {self.types}"
            )

    @property
    def encoders(self) -> tuple[Vision | UnifiedVision | Audio | UnifiedAudio, ...]:
        """Settings of images and of sound, if the model reads them."""
        return tuple(encoder for encoder in (self.vision, self.audio) if encoder is not None)

    @property
    def audio_token(self) -> int | None:
        """The placeholder of sound, which a model that only sees refuses; None for a text model."""
        return self.encoders[-1].audio_token if self.encoders else None

    @property
    def types(self) -> tuple[str, ...]:
        """LOCAL or GLOBAL for each layer."""
        return self.layer_types or pattern(self.num_layers)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """The type of each layer, and whether its keys are its own: OWN, SHARES (the last of its type) or TAKES."""
        first = self.num_layers - self.num_shared  # that takes keys
        last = {kind: i for i, kind in enumerate(self.types[:first])} if self.num_shared else {}

        def role(i: int, kind: str) -> str:
            return TAKES if i >= first else SHARES if last.get(kind) == i else OWN

        return tuple((kind, role(i, kind)) for i, kind in enumerate(self.types))

    @property
    def parts(self) -> dict[str, tuple[ops.Mask, Rope, tuple[int, int]]]:
        """Mask, rotary embedding, and width and number of the key heads of either type of layer."""
        # The window limits the past of images, too.
        causal = ops.Causal() | ops.BidirectionalBlocks() if self.vision and self.both_ways else ops.Causal()
        local = causal & ops.SlidingWindow(self.window), self.local_rope, (self.head_dim, self.num_kv_heads)
        return {LOCAL: local, GLOBAL: (ops.Causal(), self.rope, self.global_heads)}


def pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    """Returns the usual types: every sixth layer is global, and the last one."""
    return tuple(LOCAL if (i + 1) % period and i + 1 < num_layers else GLOBAL for i in range(num_layers))


def _usual_types(c: Any) -> tuple[str, ...]:
    return pattern(c.num_layers)


def _is_unified(c: Any) -> bool:
    return c.model_type == "gemma4_unified_text"


def _read_global(hf: HFConfig, c: Any) -> tuple[int, int]:
    width, heads = hf.take("global_head_dim", 512), hf.take("num_global_key_value_heads", None, kind=int)
    layers = [i for i, kind in enumerate(c.layer_types or _usual_types(c)) if kind == GLOBAL]
    stored = _of_layers(hf, layers, {"head_dim": c.head_dim, "num_key_value_heads": c.num_kv_heads})
    if stored is not None:
        return stored["head_dim"], stored["num_key_value_heads"]  # as transformers writes them
    return width, heads if heads is not None and c.keys_as_values else c.num_kv_heads


def _of_layers(hf: HFConfig, layers: Sequence[int], usual: Mapping[str, int]) -> dict[str, int] | None:
    """Takes `per_layer_config`, the sizes of some layers where they are not the usual ones; None if it is absent."""
    sizes = hf.take("per_layer_config", None, kind=dict)
    if sizes is None:
        return None
    first, *others = sizes.values() or [{}]
    alike = all(other == first for other in others) and first.keys() <= usual.keys()
    if not alike or (sizes and sorted(map(int, sizes)) != sorted(layers)):
        raise ValueError(
            f"{hf.where('per_layer_config')} must give {' and '.join(usual)}, the same for each of the layers {layers} and "
            f"nothing for others, got {sizes}."
        )
    return {**usual, **first}


def _write_global(heads: tuple[int, int], cfg: Any) -> dict[str, Any]:
    return {"global_head_dim": heads[0], "num_global_key_value_heads": heads[1]}


def _of_experts(name: str, hf_name: str) -> Computed:
    """Makes the entry for a size that only models with experts have; None in the others."""

    def read(hf: HFConfig, c: Any) -> int | None:
        return hf.take(hf_name, kind=int) if c.sparse else hf.take(hf_name, None) and None

    return Computed(name, read, lambda value, cfg: {hf_name: value})


_PER_LAYER = "hidden_size_per_layer_input"


def _read_per_layer(hf: HFConfig, c: Any) -> int:
    # The 12B model has none unless config.json says so.
    return hf.take(_PER_LAYER, 0 if _is_unified(c) else 256)


_BOTH_WAYS = "use_bidirectional_attention"


def _read_both_ways(hf: HFConfig, c: Any) -> bool:
    usual = "vision" if _BOTH_WAYS not in hf and _is_unified(c) else None
    return hf.require(_BOTH_WAYS, usual, "vision", None) == "vision"


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.WINDOW,
        fields.layer_types(LOCAL, GLOBAL, usual=_usual_types),
        Field("keys_as_values", "attention_k_eq_v"),
        Computed("global_heads", _read_global, _write_global),
        fields.layer_rope(
            "rope", GLOBAL, lambda c: c.global_heads[0], lambda dim: Rope(dim, 1e6, ProportionalScaling(0.25))
        ),
        fields.layer_rope("local_rope", LOCAL, lambda c: c.head_dim, Rope),
        Field("num_shared", "num_kv_shared_layers"),
        Field("shared_wide", "use_double_wide_mlp"),
        Computed("per_layer_dim", _read_per_layer, lambda dim, cfg: {_PER_LAYER: dim}),
        Field("per_layer_vocab", "vocab_size_per_layer_input"),
        Field("sparse", "enable_moe_block"),
        _of_experts("num_experts", "num_experts"),
        _of_experts("top_k", "top_k_experts"),
        _of_experts("expert_dim", "moe_intermediate_size"),
        Field("final_softcap", "final_logit_softcapping"),
        fields.ATTENTION_BIAS,
        Computed("both_ways", _read_both_ways, lambda both, cfg: {_BOTH_WAYS: "vision" if both else None}),
        Field("pad_token", "pad_token_id"),
    ],
    model_types=dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "Gemma4ForCausalLM"),
    model_type=lambda cfg: "gemma4_unified_text" if _has_unified(cfg) else "gemma4_text",
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    absent={
        "vocab": 262_144,
        "num_layers": 30,
        "dim": 2304,
        "mlp_dim": 9216,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "window": lambda c: 1024 if _is_unified(c) else 512,
        "final_softcap": None,
    },
)


def _has_unified(cfg: Config) -> bool:
    return any(encoder.unified for encoder in cfg.encoders)


@dataclass(frozen=True)
class _Encoder:
    """The fields of an encoder: which ones depends on `model_type`, and a model may lack it."""

    parent: str
    fields: Fields
    unified: Fields
    ignored: str  # a field of processors
    tokens: Sequence[str]  # fields without a meaning in a model without the encoder

    def read(self, hf: HFConfig) -> Any:
        hf.ignore(self.ignored)
        if hf.take(self.parent, None, kind=dict) is None:
            hf.ignore(*self.tokens)
            return None
        return (self.unified if hf.take("model_type") == "gemma4_unified" else self.fields).read(hf)

    def write(self, value: Any) -> dict[str, Any]:
        return (self.unified if value.unified else self.fields).write(value)


_VISION = _Encoder(
    "vision_config",
    _gemma4_vision.VISION,
    _gemma4_vision.UNIFIED,
    "vision_soft_tokens_per_image",
    ["image_token_id", "video_token_id", "boi_token_id", "eoi_token_id"],
)
_AUDIO = _Encoder(
    "audio_config",
    _gemma4_audio.AUDIO,
    _gemma4_audio.UNIFIED,
    "audio_ms_per_token",
    ["audio_token_id", "boa_token_id", "boa_token_index", "eoa_token_id", "eoa_token_index"],
)
FIELDS = Multimodal(
    TEXT,
    {"vision": _VISION, "audio": _AUDIO},
    model_types={
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    },
    model_type=lambda cfg: "gemma4_unified" if _has_unified(cfg) else "gemma4",
    tied=True,
)


SEES, HEARS = ("vision_tower", "embed_vision", "vision_embedder"), ("audio_tower", "embed_audio")
PATCH = "E (a b C) -> E a b C"  # rows and columns of a patch's pixels, and colors


def table(cfg: Any) -> Table:
    """Maps the tensor names of the releases to parameters; `cfg` is a `gemma4.Config`."""
    fused = (("gate", 0), ("up", cfg.expert_dim or 0))  # in one tensor, first all rows of the gates
    layer = [
        *names.SANDWICH_NORMS,
        *names.ATTENTION,
        *names.MLP,
        Weight("layer_scalar", "factor"),
        Weight("router.proj.weight", "moe.router.gate.w"),
        Weight("router.scale", "moe.router.norm.scale"),
        Weight("router.per_expert_scale", "moe.router.expert_scale"),
        *(Weight("experts.gate_up_proj", f"moe.{part}.w", "E F D -> E F D", at={"F": row}) for part, row in fused),
        Weight("experts.down_proj", "moe.down.w"),
        Weight("pre_feedforward_layernorm_2.weight", "moe_norm.scale"),
        Weight("post_feedforward_layernorm_1.weight", "mlp_own_norm.scale"),
        Weight("post_feedforward_layernorm_2.weight", "moe_post_norm.scale"),
        Weight("per_layer_input_gate.weight", "per_layer.gate.w"),
        Weight("per_layer_projection.weight", "per_layer.proj.w"),
        Weight("post_per_layer_input_norm.weight", "per_layer.norm.scale"),
    ]
    text = "model.language_model" if cfg.encoders else "model"
    per_layer = [
        Weight(f"{text}.embed_tokens_per_layer.weight", "per_layer.embed.w"),
        Weight(f"{text}.per_layer_model_projection.weight", "per_layer.proj.w"),
        Weight(f"{text}.per_layer_projection_norm.weight", "per_layer.norm.scale"),
    ]
    # Releases have keys and values also of layers that take others'.
    takers = [i for i, (_, role) in enumerate(cfg.kinds) if role == "takes"]
    ignored: list[Any] = [Ignore(f"{text}.layers.{i}.self_attn.{part}_*") for i in takers for part in "kv"]
    # A model is also read without the encoders that its checkpoint has.
    unread = (() if cfg.vision else SEES) + (() if cfg.audio else HEARS)
    ignored += [Ignore(f"model.{name}.*") for name in unread]
    if not cfg.encoders:
        return [*names.decoder_table(layer), *per_layer, Renamed("model.language_model.", "model."), *ignored]
    read = [*(_images(cfg.vision) if cfg.vision else ()), *(_audio(cfg.audio) if cfg.audio else ())]
    return [*names.decoder_table(layer, model=text), *per_layer, *read, *ignored]


def _audio(cfg: Audio | UnifiedAudio) -> list[Weight]:
    """Lists the tensors of the encoder of sound."""
    projector = Weight("model.embed_audio.embedding_projection.weight", "audio_tower.projector.proj.w")
    if isinstance(cfg, UnifiedAudio):
        return [projector]
    hf_prefix = "model.audio_tower"
    inner = f"{hf_prefix}.subsample_conv_projection"
    table = [Weight(f"{inner}.input_proj_linear.weight", "audio_tower.enter.w", "E (m c) -> E m c"), projector]
    for n, part in enumerate(("first", "second")):
        table += [Weight(f"{inner}.layer{n}.conv.weight", f"audio_tower.{part}.w")]
        table += [Weight(f"{inner}.layer{n}.norm.weight", f"audio_tower.{part}.norm.scale")]
    table += [Weight(f"{hf_prefix}.output_proj.{name}", f"audio_tower.leave.{name[0]}") for name in ("weight", "bias")]
    return [*table, *names.under(_audio_layer(cfg), f"{hf_prefix}.layers.{{i}}", "audio_tower.layers.{i}")]


def _audio_layer(cfg: Audio) -> list[Weight]:
    """Lists the tensors of a layer of the encoder of sound."""
    linear = [("self_attn.post", "attn.o", "D (N H) -> D N H")]
    linear += [(f"self_attn.{part}_proj", f"attn.{part}", "(N H) D -> N H D") for part in "qkv"]
    linear += [(f"lconv1d.linear_{end}", f"conv.{name}", None) for end, name in (("start", "enter"), ("end", "leave"))]
    norms = [("lconv1d.pre_layer_norm", "conv.norm"), ("lconv1d.conv_norm", "conv.filter_norm")]
    norms += [("norm_pre_attn", "attn_norm"), ("norm_post_attn", "attn_post_norm"), ("norm_out", "norm")]
    for n, mlp in ((1, "first_mlp"), (2, "second_mlp")):
        inner = f"feed_forward{n}"
        linear += [(f"{inner}.ffw_layer_{k}", f"{mlp}.{part}", None) for k, part in ((1, "up"), (2, "down"))]
        norms += [(f"{inner}.pre_layer_norm", f"{mlp}.norm"), (f"{inner}.post_layer_norm", f"{mlp}.post_norm")]
    return [
        *(Weight(f"{hf_name}.weight", f"{path}.scale") for hf_name, path in norms),
        *(entry for projection in linear for entry in _linear(*projection, clipped=cfg.clipped)),
        Weight("self_attn.relative_k_proj.weight", "attn.distance.w", "(N H) D -> N H D"),
        Weight("self_attn.per_dim_scale", "attn.scale"),
        Weight("lconv1d.depthwise_conv1d.weight", "conv.filter", "D one W -> D W", at={"one": 0}),
    ]


def _linear(hf_name: str, path: str, pattern: str | None, *, clipped: bool) -> list[Weight]:
    """Lists the tensors of a linear layer, which is one level deeper in files, and here where it has bounds."""
    bounds = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")] if clipped else []
    return [
        Weight(f"{hf_name}.linear.weight", f"{path}.linear.w" if clipped else f"{path}.w", pattern),
        *(Weight(f"{hf_name}.{bound}", f"{path}.{bound}") for bound in bounds),
    ]


def _images(cfg: Vision | UnifiedVision) -> list[Weight]:
    """Lists the tensors of the encoder."""
    projector = Weight("model.embed_vision.embedding_projection.weight", "tower.projector.proj.w")
    if isinstance(cfg, UnifiedVision):
        hf_prefix = "model.vision_embedder"
        return [
            *names.layer_norm(f"{hf_prefix}.patch_ln1", "tower.patch_norm"),
            Weight(f"{hf_prefix}.patch_dense.weight", "tower.patches.w", PATCH),
            Weight(f"{hf_prefix}.patch_dense.bias", "tower.patches.b"),
            *names.layer_norm(f"{hf_prefix}.patch_ln2", "tower.embed_norm"),
            *_positions(f"{hf_prefix}.pos_embedding", "P two E -> P E"),
            *names.layer_norm(f"{hf_prefix}.pos_norm", "tower.position_norm"),
            projector,
        ]
    hf_prefix = "model.vision_tower"
    return [
        Weight(f"{hf_prefix}.patch_embedder.input_proj.weight", "tower.patches.w", PATCH),
        *_positions(f"{hf_prefix}.patch_embedder.position_embedding_table", "two P E -> P E"),
        *names.under(_encoder_layer(cfg), f"{hf_prefix}.encoder.layers.{{i}}", "tower.layers.{i}"),
        Weight(f"{hf_prefix}.std_bias", "tower.bias"),
        Weight(f"{hf_prefix}.std_scale", "tower.scale"),
        projector,
    ]


def _positions(hf_name: str, pattern: str) -> list[Weight]:
    """Lists both tables of positions, which files have in one."""
    return [
        Weight(hf_name, f"tower.positions.{part}", pattern, {"two": n}) for n, part in enumerate(("columns", "rows"))
    ]


def _encoder_layer(cfg: Vision) -> list[Weight]:
    """Lists the tensors of a layer of the image encoder."""
    table: list[Weight] = list(names.SANDWICH_NORMS)
    for entry in (*names.ATTENTION, *names.MLP):
        stem, _, last = entry.hf_name.rpartition(".")
        if "_norm" in stem:
            table.append(entry)
        elif last == "weight":
            table += _linear(stem, entry.path.removesuffix(".w"), entry.pattern, clipped=cfg.clipped)
    return table
