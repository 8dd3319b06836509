"""Gemma 3: five local layers to a global one, normed queries and keys, images in (Gemma team 2025, arXiv:2503.19786)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn, ops
from maxlib.ops.rope import LinearScaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Copy, Family, HFConfig, Ignore, Renamed, Table, Weight, rope_to_hf

LOCAL, GLOBAL = "sliding_attention", "full_attention"
GELU = "gelu_pytorch_tanh"
CONTEXT = 131_072  # what configs that give no length mean


def _pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    return tuple(LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers))


# Our fields of a text model, theirs, and what the configs of models that see mean by leaving one out.
TEXT = {
    "vocab": ("vocab_size", 262_208),
    "num_layers": ("num_hidden_layers", 26),
    "dim": ("hidden_size", 2304),
    "mlp_dim": ("intermediate_size", 9216),
    "num_heads": ("num_attention_heads", 8),
    "num_kv_heads": ("num_key_value_heads", 4),
    "head_dim": ("head_dim", 256),
    "window": ("sliding_window", 4096),
    "query_scalar": ("query_pre_attn_scalar", 256),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", True),
    "attention_bias": ("attention_bias", False),
}
TOWER = {
    "dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "norm_eps": "layer_norm_eps",
}
IMAGES = {
    "num_tokens": "mm_tokens_per_image",
    "image_token": "image_token_index",
    "begin_token": "boi_token_index",
    "end_token": "eoi_token_index",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vision:
    """The image tower, and what stands for an image in the text: `num_tokens` times `image_token`."""

    dim: int = 1152
    mlp_dim: int = 4304
    num_layers: int = 27
    num_heads: int = 16
    image_size: int = 896
    patch_size: int = 14
    norm_eps: float = 1e-6
    num_tokens: int = 256
    image_token: int = 262_144
    begin_token: int = 255_999
    end_token: int = 256_000

    def __post_init__(self):
        if self.num_tokens * (self.pool * self.patch_size) ** 2 != self.image_size**2:
            raise ValueError(
                f"num_tokens must be a square whose root divides the {self.image_size} / {self.patch_size} patches of a "
                f"side, got {self.num_tokens}"
            )

    @property
    def pool(self) -> int:
        """Side of the squares of patches that become one vector."""
        return self.image_size // self.patch_size // math.isqrt(self.num_tokens)

    def tower(self, rngs: nnx.Rngs) -> nn.SigLIP:
        sizes = {name: getattr(self, name) for name in ("num_layers", "num_heads", "image_size", "patch_size")}
        return nn.SigLIP(self.dim, self.mlp_dim, **sizes, eps=self.norm_eps, rngs=rngs)

    def projector(self, dim: int, rngs: nnx.Rngs) -> nn.PoolProjector:
        norm = nn.RMSNorm(self.dim, eps=self.norm_eps, plus_one=True)
        return nn.PoolProjector(self.dim, dim, pool=self.pool, norm=norm, rngs=rngs)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Vision":
        """Reads the part of config.json that is about images."""
        tower = fields.nested("vision_config")
        tower.require("model_type", "siglip_vision_model")
        tower.require("hidden_act", GELU)
        tower.require("num_channels", 3)
        tower.ignore("vision_use_head")  # a pooling head that Gemma 3 never calls
        default = {field.name: field.default for field in dataclasses.fields(cls)}
        read = {ours: tower.take(theirs, kind=int) for ours, theirs in TOWER.items() if ours != "norm_eps"}
        read |= {ours: fields.take(theirs, default[ours]) for ours, theirs in IMAGES.items()}
        return cls(**read, norm_eps=tower.take("layer_norm_eps", 1e-6))

    def to_hf(self) -> dict[str, Any]:
        tower = {"model_type": "siglip_vision_model", "num_channels": 3, "hidden_act": GELU, "vision_use_head": False}
        tower |= {theirs: getattr(self, ours) for ours, theirs in TOWER.items()}
        return {"vision_config": tower} | {theirs: getattr(self, ours) for ours, theirs in IMAGES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Gemma 3 from another; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope  # of the global layers
    local_rope: Rope
    window: int  # of the local layers
    layer_types: tuple[str, ...] | None = None  # LOCAL or GLOBAL each; None: every sixth is global
    query_scalar: int = 256  # scores are multiplied by its inverse square root
    norm_eps: float = 1e-6
    tied: bool = True
    attention_bias: bool = False
    vision: Vision | None = None

    @property
    def types(self) -> tuple[str, ...]:
        return self.layer_types or _pattern(self.num_layers)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        if fields.require("model_type", "gemma3_text", "gemma3") == "gemma3_text":
            return cls._from_text(fields)
        text = cls._from_text(fields.nested("text_config"))
        tied = fields.take("tie_word_embeddings", text.tied)
        return dataclasses.replace(text, vision=Vision.from_hf(fields), tied=tied)

    @classmethod
    def _from_text(cls, fields: HFConfig) -> "Config":
        fields.require("model_type", "gemma3_text")
        fields.require("hidden_activation", GELU)
        fields.require("hidden_act", GELU)
        for name in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
            fields.require(name, None, False)
        read = {ours: fields.take(theirs, default) for ours, (theirs, default) in TEXT.items()}
        types = fields.layer_types(read["num_layers"], LOCAL, GLOBAL)
        period = fields.take("sliding_window_pattern", 6)
        fields.ignore("_sliding_window_pattern")  # transformers 5 writes it beside layer_types, and never reads it
        types = types or _pattern(read["num_layers"], period)
        local = {"layer_type": LOCAL, "theta_field": "rope_local_base_freq", "scaling_field": None}
        length = {"head_dim": read["head_dim"], "default_length": CONTEXT}
        return cls(
            **read,
            rope=fields.rope(layer_type=GLOBAL, default_theta=1e6, **length),
            local_rope=fields.rope(**local, **length),
            layer_types=None if types == _pattern(read["num_layers"]) else types,
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json. Raises ValueError for a rope that Hugging Face's class does not have."""
        if self.vision is None:
            return {"architectures": ["Gemma3ForCausalLM"], **self._text_to_hf()}
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": self._text_to_hf(),
            "tie_word_embeddings": self.tied,
            **self.vision.to_hf(),
        }

    def _text_to_hf(self) -> dict[str, Any]:
        far = rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True)
        near = rope_to_hf(self.local_rope, head_dim=self.head_dim, whole_heads=True)
        return {
            "model_type": "gemma3_text",
            **{theirs: getattr(self, ours) for ours, (theirs, _) in TEXT.items()},
            "hidden_activation": GELU,
            "layer_types": list(self.types),
            **far,
            "rope_local_base_freq": near["rope_theta"],
            "rope_parameters": {GLOBAL: far["rope_parameters"], LOCAL: near["rope_parameters"]},
        }


class Block(nnx.Module):
    """Sandwich norms: each branch is normed before and after."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope, *, rngs: nnx.Rngs):
        norm = lambda dim: nn.RMSNorm(dim, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm(cfg.dim)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=rope,
            q_norm=norm(cfg.head_dim),
            k_norm=norm(cfg.head_dim),
            scale=cfg.query_scalar**-0.5,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.attn_post_norm = norm(cfg.dim)
        self.mlp_norm = norm(cfg.dim)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = norm(cfg.dim)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Gemma3(nn.Decoder):
    """A decoder, `docs/decisions/0001`, which sees images if `cfg.vision` is given."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        # The window also limits what the tokens of one image see of each other.
        both_ways = ops.Causal() | ops.Spans()
        kinds = {LOCAL: (both_ways & ops.SlidingWindow(cfg.window), cfg.local_rope), GLOBAL: (both_ways, cfg.rope)}
        self.masks, self.ropes = zip(*kinds.values(), strict=True)
        make = lambda i, rngs: Block(cfg, *kinds[cfg.types[i]], rngs=rngs)
        # Scaled by sqrt(dim), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(cfg.types), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
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
        """images: what Hugging Face's processor calls pixel_values, in the order of their placeholders in `tokens`.

        Raises ValueError for images that the model cannot see, and for placeholders that are not `num_tokens` per image;
        where jit hides the ids, these become NaN instead.
        """
        x, is_image = self._inputs(tokens, images, dtype, remat)
        return self.run(
            x,
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            spans=None if is_image is None else nn.spans(is_image, segment_ids=segment_ids, cache=cache),
            cache=cache,
            remat=remat,
        )

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)

    def _inputs(self, tokens, images, dtype, remat) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"] | None]:
        """Vectors for the tokens, and which of them are images'."""
        x = self.embed_tokens(tokens, dtype)
        self.check_images(tokens, images)
        if images is None or self.cfg.vision is None or self.tower is None or self.projector is None:
            return x, None
        is_image = tokens == self.cfg.vision.image_token
        features = self.projector(self.tower(images, dtype=dtype, remat=remat))
        return nn.place_features(x, is_image, features), is_image

    def check_images(self, tokens: Int[Any, "B T"], images: Float[Any, "I C H W"] | None) -> None:
        """Raises ValueError as `__call__` does; a generator asks before it enters jit."""
        if self.cfg.vision is not None:
            count = 0 if images is None else len(images) * self.cfg.vision.num_tokens
            nn.check_placeholders(tokens == self.cfg.vision.image_token, count)
        elif images is not None:
            raise ValueError("this Gemma 3 reads text only (its config has no vision): call it without images")


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights; those of models that see have a prefix."""
    text = "" if cfg.vision is None else "language_model."
    layer = {
        "input_layernorm.weight": ("attn_norm.scale", None),
        "self_attn.q_proj.weight": ("attn.q.w", "(N H) D -> N H D"),
        "self_attn.q_proj.bias": ("attn.q.b", "(N H) -> N H"),
        "self_attn.k_proj.weight": ("attn.k.w", "(K H) D -> K H D"),
        "self_attn.k_proj.bias": ("attn.k.b", "(K H) -> K H"),
        "self_attn.v_proj.weight": ("attn.v.w", "(K H) D -> K H D"),
        "self_attn.v_proj.bias": ("attn.v.b", "(K H) -> K H"),
        "self_attn.o_proj.weight": ("attn.o.w", "D (N H) -> D N H"),
        "self_attn.o_proj.bias": ("attn.o.b", None),
        "self_attn.q_norm.weight": ("attn.q_norm.scale", None),
        "self_attn.k_norm.weight": ("attn.k_norm.scale", None),
        "post_attention_layernorm.weight": ("attn_post_norm.scale", None),
        "pre_feedforward_layernorm.weight": ("mlp_norm.scale", None),
        "mlp.gate_proj.weight": ("mlp.gate.w", None),
        "mlp.up_proj.weight": ("mlp.up.w", None),
        "mlp.down_proj.weight": ("mlp.down.w", None),
        "post_feedforward_layernorm.weight": ("mlp_post_norm.scale", None),
    }
    return [
        Weight(text + "model.embed_tokens.weight", "embed.w"),
        *[Weight(text + "model.layers.{i}." + name, "layers.{i}." + path, p) for name, (path, p) in layer.items()],
        Weight(text + "model.norm.weight", "norm.scale"),
        Weight(text + "lm_head.weight", "head.w"),
        Copy(text + "lm_head.weight", of=text + "model.embed_tokens.weight"),
        *([] if cfg.vision is None else _sight()),
    ]


def _sight() -> Table:
    """The tower's and the projector's names. Releases have `vision_model` in them; transformers writes other spellings too."""
    layer = {
        "layer_norm1.weight": ("attn_norm.scale", None),
        "layer_norm1.bias": ("attn_norm.bias", None),
        **{f"self_attn.{x}_proj.weight": (f"attn.{x}.w", "(N H) D -> N H D") for x in "qkv"},
        **{f"self_attn.{x}_proj.bias": (f"attn.{x}.b", "(N H) -> N H") for x in "qkv"},
        "self_attn.out_proj.weight": ("attn.o.w", "D (N H) -> D N H"),
        "self_attn.out_proj.bias": ("attn.o.b", None),
        "layer_norm2.weight": ("mlp_norm.scale", None),
        "layer_norm2.bias": ("mlp_norm.bias", None),
        "mlp.fc1.weight": ("mlp.up.w", None),
        "mlp.fc1.bias": ("mlp.up.b", None),
        "mlp.fc2.weight": ("mlp.down.w", None),
        "mlp.fc2.bias": ("mlp.down.b", None),
    }
    theirs, ours = "vision_tower.vision_model.", "tower.layers.{i}."
    return [
        Weight(theirs + "embeddings.patch_embedding.weight", "tower.patches.w"),
        Weight(theirs + "embeddings.patch_embedding.bias", "tower.patches.b"),
        Weight(theirs + "embeddings.position_embedding.weight", "tower.positions"),
        *[Weight(theirs + "encoder.layers.{i}." + name, ours + path, p) for name, (path, p) in layer.items()],
        Weight(theirs + "post_layernorm.weight", "tower.norm.scale"),
        Weight(theirs + "post_layernorm.bias", "tower.norm.bias"),
        Ignore(theirs + "head.*"),
        Weight("multi_modal_projector.mm_soft_emb_norm.weight", "projector.norm.scale"),
        Weight("multi_modal_projector.mm_input_projection_weight", "projector.proj.w"),
        Renamed("lm_head.", "language_model.lm_head."),
        Renamed("model.language_model.", "language_model.model."),
        Renamed("model.multi_modal_projector.", "multi_modal_projector."),
        Renamed("model.vision_tower.", "vision_tower."),
        Renamed("vision_tower.", theirs),
    ]


def _ropes(head_dim: int, length: int, *, factor: float = 1.0) -> dict[str, Any]:
    scaling = None if factor == 1.0 else LinearScaling(factor)
    far = Rope(head_dim, 1_000_000.0, scaling, max_length=round(length * factor))
    return {"rope": far, "local_rope": Rope(head_dim, 10_000.0, max_length=length)}


_1B = Config(
    vocab=262_144,
    num_layers=26,
    dim=1152,
    mlp_dim=6912,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    window=512,
    **_ropes(256, 32_768),
)
_4B = Config(
    vocab=262_208,
    num_layers=34,
    dim=2560,
    mlp_dim=10_240,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    window=1024,
    **_ropes(256, CONTEXT, factor=8.0),
    vision=Vision(),
)

PRESETS = {
    "gemma3-270m": dataclasses.replace(_1B, num_layers=18, dim=640, mlp_dim=2048),
    "gemma3-1b": _1B,
    "gemma3-4b": _4B,
    "gemma3-12b": dataclasses.replace(_4B, num_layers=48, dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma3-27b": dataclasses.replace(
        _4B,
        num_layers=62,
        dim=5376,
        mlp_dim=21_504,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        query_scalar=168,
        **_ropes(128, CONTEXT, factor=8.0),
    ),
}

FAMILY = Family(
    name="gemma3", model_types=("gemma3_text", "gemma3"), model=Gemma3, config=Config, table=_table, presets=PRESETS
)
