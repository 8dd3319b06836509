"""Llama 4 Scout and Maverick: local layers that rotate, global ones that do not, experts, images in (Meta AI 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn, ops
from maxlib.ops.rope import Llama3Scaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Copy, Family, HFConfig, Ignore, Renamed, Table, Weight, rope_to_hf

LOCAL, GLOBAL = "chunked_attention", "full_attention"
SHUFFLE = 2  # side of the squares of patches that become one vector

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
TOWER = {
    "dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 34),
    "num_heads": ("num_attention_heads", 16),
    "image_size": ("image_size", 448),
    "patch_size": ("patch_size", 14),
    "projector_dim": ("projector_output_dim", 4096),
}
IMAGES = {
    "image_token": ("image_token_index", 200_092),
    "begin_token": ("boi_token_index", 200_080),
    "end_token": ("eoi_token_index", 200_081),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """The image tower, and what stands for a tile of an image in the text: `num_tokens` times `image_token`."""

    dim: int = 1408
    num_layers: int = 34
    num_heads: int = 16
    image_size: int = 336
    patch_size: int = 14
    projector_dim: int = 4096
    rope_theta: float = 10_000.0
    image_token: int = 200_092
    begin_token: int = 200_080
    end_token: int = 200_081

    def __post_init__(self):
        if self.image_size % (SHUFFLE * self.patch_size):
            raise ValueError(f"image_size must be a multiple of {SHUFFLE * self.patch_size}, got {self.image_size}")

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size // SHUFFLE) ** 2

    @property
    def mlp_dim(self) -> int:
        """Of the tower; the projector takes as many from a square of patches, and Hugging Face has one field for both."""
        return self.dim * SHUFFLE**2

    def tower(self, rngs: nnx.Rngs) -> nn.Llama4Vision:
        sizes = {name: getattr(self, name) for name in ("num_layers", "num_heads", "image_size", "patch_size")}
        return nn.Llama4Vision(self.dim, self.mlp_dim, **sizes, theta=self.rope_theta, rngs=rngs)

    def projector(self, dim: int, rngs: nnx.Rngs) -> nn.ShuffleProjector:
        return nn.ShuffleProjector(self.dim, self.projector_dim, dim, shuffle=SHUFFLE, rngs=rngs)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Vision":
        """Reads the part of config.json that is about images."""
        tower = fields.nested("vision_config")
        tower.require("model_type", "llama4_vision_model")
        tower.require("hidden_act", "gelu")
        tower.require("num_channels", 3)
        # The releases have these, and nothing reads them: the norms' epsilon is 1e-5, and no projector has a bias.
        tower.ignore("norm_eps", "multi_modal_projector_bias", "vision_feature_layer", "vision_feature_select_strategy")
        tower.require("pixel_shuffle_ratio", 1 / SHUFFLE)
        read = {ours: tower.take(theirs, default) for ours, (theirs, default) in TOWER.items()}
        read |= {ours: fields.take(theirs, default) for ours, (theirs, default) in IMAGES.items()}
        rope = tower.rope(head_dim=read["dim"] // read["num_heads"])
        if rope.scaling is not None:
            raise ValueError(f"config.json: the rope of vision_config must have no scaling, got {rope.scaling}")
        vision = cls(**read, rope_theta=rope.theta)
        tower.require("intermediate_size", vision.mlp_dim)
        for name in ("projector_input_dim", "vision_output_dim"):
            tower.require(name, vision.projector_dim)
        return vision

    def to_hf(self) -> dict[str, Any]:
        tower = {
            "model_type": "llama4_vision_model",
            "num_channels": 3,
            "hidden_act": "gelu",
            "intermediate_size": self.mlp_dim,
            "projector_input_dim": self.projector_dim,
            "vision_output_dim": self.projector_dim,
            "pixel_shuffle_ratio": 1 / SHUFFLE,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }
        tower |= {theirs: getattr(self, ours) for ours, (theirs, _) in TOWER.items()}
        return {"vision_config": tower} | {theirs: getattr(self, ours) for ours, (theirs, _) in IMAGES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Llama 4 from another; `PRESETS` has the published ones.

    rotated, layer_types, sparse: an entry for each layer. None means that all but every fourth are rotated, that these see
    only their chunk of the text, and that every `moe_every`th has experts. losses: what the routers report for training.
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
    rotated: tuple[bool, ...] | None = None
    layer_types: tuple[str, ...] | None = None  # LOCAL or GLOBAL each
    sparse: tuple[bool, ...] | None = None
    losses: tuple[Any, ...] = ()
    vision: Vision | None = None

    def __post_init__(self):
        named = {"rotated (no_rope_layers)": self.rotated, "layer_types": self.layer_types, "sparse": self.sparse}
        for name, value in named.items():
            if value is not None and len(value) != self.num_layers:
                raise ValueError(
                    f"{name} must have an entry for each of the {self.num_layers} layers, got {len(value)}"
                )
        if self.qk_norm and self.rope.scaling is not None and self.rope.scaling.magnitude != 1:
            raise ValueError(f"with qk_norm (use_qk_norm) the rope must have magnitude 1, got {self.rope.scaling}")

    @property
    def turned(self) -> tuple[bool, ...]:
        return self.rotated or tuple((i + 1) % 4 != 0 for i in range(self.num_layers))

    @property
    def types(self) -> tuple[str, ...]:
        return self.layer_types or tuple(LOCAL if turned else GLOBAL for turned in self.turned)

    @property
    def experts(self) -> tuple[bool, ...]:
        return self.sparse or tuple((i + 1) % self.moe_every == 0 for i in range(self.num_layers))

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
        return _with_layers(fields, cls(**read, rope=rope, temperature=tuning if tuned else None))

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
        if not self.rope.interleaved or self.rope.dim != self.head_dim:
            raise ValueError(
                f"Hugging Face's Llama 4 turns interleaved pairs of whole heads: the rope must have dim={self.head_dim}, "
                f"got {self.rope}"
            )
        tuning = self.temperature or nn.TemperatureTuning(8192, 0.1)
        return {
            "model_type": "llama4_text",
            **{theirs: getattr(self, ours) for ours, (theirs, _) in TEXT.items()},
            "hidden_act": "silu",
            "no_rope_layers": [int(turned) for turned in self.turned],  # sic: 1 is rotated
            "no_rope_layer_interval": 4,
            "layer_types": list(self.types),
            "moe_layers": [i for i, sparse in enumerate(self.experts) if sparse],
            "attn_temperature_tuning": self.temperature is not None,
            "floor_scale": tuning.floor,
            "attn_scale": tuning.scale,
            **rope_to_hf(self.rope, head_dim=self.head_dim),
        }


def _with_layers(fields: HFConfig, cfg: Config) -> Config:
    """`cfg` with what config.json says of single layers, where that is not what None means."""
    every, layers = fields.take("no_rope_layer_interval", 4), range(cfg.num_layers)
    rotated = tuple(map(bool, fields.take("no_rope_layers", [], kind=list)))[: cfg.num_layers]
    rotated = rotated or tuple((i + 1) % every != 0 for i in layers)
    cfg = cfg if rotated == cfg.turned else dataclasses.replace(cfg, rotated=rotated)
    types = fields.layer_types(cfg.num_layers, LOCAL, GLOBAL) or cfg.types
    cfg = cfg if types == cfg.types else dataclasses.replace(cfg, layer_types=types)
    chosen = fields.take("moe_layers", None, kind=list)
    sparse = cfg.experts if chosen is None else tuple(i in chosen for i in layers)
    return cfg if sparse == cfg.experts else dataclasses.replace(cfg, sparse=sparse)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.InputRouter(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.expert_dim, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, cfg: Config, layer_type: str, rotated: bool, sparse: bool, *, rngs: nnx.Rngs):
        # Having no weight, it may stand before the rotation, which changes no length.
        norm = nn.UnitRMSNorm(cfg.norm_eps) if cfg.qk_norm and rotated else None
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=cfg.masks[layer_type],
            rope=cfg.rope if rotated else None,
            q_norm=norm,
            k_norm=norm,
            temperature=None if rotated else cfg.temperature,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Llama4(nn.Decoder):
    """A decoder, `docs/decisions/0001`, which sees images if `cfg.vision` is given."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = tuple(cfg.masks.values()), (cfg.rope,)
        kinds = list(zip(cfg.types, cfg.turned, cfg.experts, strict=True))
        make = lambda i, rngs: Block(cfg, *kinds[i], rngs=rngs)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(kinds), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else cfg.vision.tower(rngs)
        self.projector = None if cfg.vision is None else cfg.vision.projector(cfg.dim, rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        images: Float[Array, "I C H W"] | None = None,
        cache: nn.Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: nn.Policy = None,
    ) -> nn.Output:
        """images: what Hugging Face's processor calls pixel_values: tiles, in the order of their placeholders in `tokens`.

        Raises ValueError for images that the model cannot see, and for placeholders that are not `num_tokens` per tile;
        where jit hides the ids, these become NaN instead.
        """
        x = self._inputs(tokens, images, dtype, remat)
        return self.run(x, positions=positions, segment_ids=segment_ids, valid=valid, cache=cache, remat=remat)

    def _inputs(self, tokens, images, dtype, remat) -> Float[Array, "B T D"]:
        """A vector for each token; images are read as text is, from left to right."""
        self.check_images(tokens, images)
        x = self.embed(tokens, dtype=dtype)
        if images is None or self.cfg.vision is None or self.tower is None or self.projector is None:
            return x
        features = self.projector(self.tower(images, dtype=dtype, remat=remat))
        return nn.place_features(x, tokens == self.cfg.vision.image_token, features)

    def check_images(self, tokens: Int[Any, "B T"], images: Float[Any, "I C H W"] | None) -> None:
        """Raises ValueError as `__call__` does; a generator asks before it enters jit."""
        if self.cfg.vision is not None:
            count = 0 if images is None else len(images) * self.cfg.vision.num_tokens
            nn.check_placeholders(tokens == self.cfg.vision.image_token, count)
        elif images is not None:
            raise ValueError("this Llama 4 reads text only (its config has no vision): call it without images")


# What layers of the text and of the tower have in common; the text's norms, and most of its projections, have no bias.
LAYER = {
    "self_attn.q_proj.weight": ("attn.q.w", "(N H) D -> N H D"),
    "self_attn.q_proj.bias": ("attn.q.b", "(N H) -> N H"),
    "self_attn.k_proj.weight": ("attn.k.w", "(K H) D -> K H D"),
    "self_attn.k_proj.bias": ("attn.k.b", "(K H) -> K H"),
    "self_attn.v_proj.weight": ("attn.v.w", "(K H) D -> K H D"),
    "self_attn.v_proj.bias": ("attn.v.b", "(K H) -> K H"),
    "self_attn.o_proj.weight": ("attn.o.w", "D (N H) -> D N H"),
    "self_attn.o_proj.bias": ("attn.o.b", None),
    "input_layernorm.weight": ("attn_norm.scale", None),
    "input_layernorm.bias": ("attn_norm.bias", None),
    "post_attention_layernorm.weight": ("mlp_norm.scale", None),
    "post_attention_layernorm.bias": ("mlp_norm.bias", None),
}


def _layer(theirs: str, ours: str, own: Mapping[str, tuple[str, str | None]]) -> Table:
    return [Weight(theirs + name, ours + path, pattern) for name, (path, pattern) in {**LAYER, **own}.items()]


def _table(cfg: Config) -> Table:
    """Hugging Face's names; those of a model that sees have a prefix, and one without `vision` reads their text."""
    text = "" if cfg.vision is None else "language_model."
    own: dict[str, tuple[str, str | None]] = {"feed_forward.router.weight": ("moe.router.gate.w", None)}
    for part in ("gate", "up", "down"):
        own[f"feed_forward.{part}_proj.weight"] = (f"mlp.{part}.w", None)
        own[f"feed_forward.shared_expert.{part}_proj.weight"] = (f"moe.shared.{part}.w", None)
    experts, moe, halves = text + "model.layers.{i}.feed_forward.experts.", "layers.{i}.moe.", "E D (two F) -> E F D"
    blind = [Renamed("language_model.", ""), Ignore("vision_model.*"), Ignore("multi_modal_projector.*")]
    return [
        Weight(text + "model.embed_tokens.weight", "embed.w"),
        *_layer(text + "model.layers.{i}.", "layers.{i}.", own),
        Weight(experts + "gate_up_proj", moe + "gate.w", halves, at={"two": 0}),
        Weight(experts + "gate_up_proj", moe + "up.w", halves, at={"two": 1}),
        Weight(experts + "down_proj", moe + "down.w", "E F D -> E D F"),
        Weight(text + "model.norm.weight", "norm.scale"),
        Weight(text + "lm_head.weight", "head.w"),
        Copy(text + "lm_head.weight", of=text + "model.embed_tokens.weight"),
        *(blind if cfg.vision is None else _sight()),
    ]


def _sight() -> Table:
    """The tower's and the projector's names."""
    mlp = {
        f"mlp.{fc}.{kind}": (f"mlp.{ours}.{kind[0]}", None)
        for fc, ours in (("fc1", "up"), ("fc2", "down"))
        for kind in ("weight", "bias")
    }
    return [
        Weight("vision_model.patch_embedding.linear.weight", "tower.patches.w", "D (C a b) -> D C a b"),
        Weight("vision_model.class_embedding", "tower.class_token"),
        Weight("vision_model.positional_embedding_vlm", "tower.positions"),
        Weight("vision_model.layernorm_pre.weight", "tower.pre_norm.scale"),
        Weight("vision_model.layernorm_pre.bias", "tower.pre_norm.bias"),
        *_layer("vision_model.model.layers.{i}.", "tower.layers.{i}.", mlp),
        Weight("vision_model.layernorm_post.weight", "tower.norm.scale"),
        Weight("vision_model.layernorm_post.bias", "tower.norm.bias"),
        Weight("vision_model.vision_adapter.mlp.fc1.weight", "projector.up.w"),
        Weight("vision_model.vision_adapter.mlp.fc2.weight", "projector.down.w"),
        Weight("multi_modal_projector.linear_1.weight", "projector.proj.w"),
    ]


_SCOUT = Config(
    vocab=202_048,
    num_layers=48,
    dim=5120,
    mlp_dim=16_384,
    expert_dim=8192,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(128, 500_000.0, Llama3Scaling(16.0, 1.0, 1.0, 8192), interleaved=True, max_length=10_485_760),
    chunk=8192,
    num_experts=16,
    temperature=nn.TemperatureTuning(8192, 0.1),
    vision=Vision(),
)

PRESETS = {
    "llama4-17b-16e": _SCOUT,
    "llama4-17b-128e": dataclasses.replace(
        _SCOUT,
        rope=Rope(128, 500_000.0, interleaved=True, max_length=1_048_576),
        num_experts=128,
        moe_every=2,
        qk_norm=False,
    ),
}

FAMILY = Family(
    name="llama4", model_types=("llama4_text", "llama4"), model=Llama4, config=Config, table=_table, presets=PRESETS
)
