"""Gemma 4 (Google DeepMind 2026): wide global layers whose keys are values, keys shared by layers, a vector per layer.

It reads images of any size, and E2B, E4B and 12B read sound.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _gemma4_conformer, _gemma4_fields, _gemma4_names, _gemma4_towers
from maxlib.models._gemma4_audio import Audio, UnifiedAudio, read_audio
from maxlib.models._gemma4_fields import GLOBAL, LOCAL, TEXT, VISION_TYPES, pattern
from maxlib.models._gemma4_vision import UnifiedVision, Vision, read_vision
from maxlib.ops import Proportional, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, hf, hf_layer_rope, hf_layer_types

# A layer has its own keys, shares them with later layers, or takes those of the last layer that shares.
OWN, SHARES, TAKES = "own", "shares", "takes"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Gemma 4; `PRESETS` has the published ones. Vision models have theirs in `text_config`."""

    model_types = TEXT
    architecture = "Gemma4ForCausalLM"
    fixed = {"hidden_activation": "gelu_pytorch_tanh"}

    vocab: int = hf("vocab_size", absent=262_144)
    num_layers: int = hf("num_hidden_layers", absent=30)
    dim: int = hf("hidden_size", absent=2304)
    mlp_dim: int = hf("intermediate_size", absent=9216)
    num_heads: int = hf("num_attention_heads", absent=8)
    num_kv_heads: int = hf("num_key_value_heads", absent=4)  # of local layers
    head_dim: int = hf("head_dim", absent=256)  # of local layers
    window: int = hf("sliding_window", absent=512)  # of local layers
    # LOCAL or GLOBAL for each layer; None: every sixth is global, and the last.
    layer_types: tuple[str, ...] | None = hf_layer_types(LOCAL, GLOBAL, usual=lambda c: pattern(c.num_layers))
    keys_as_values: bool = hf("attention_k_eq_v", False)  # in global layers
    global_heads: tuple[int, int] = _gemma4_fields.hf_global_heads()  # width and number of their key heads
    rope: Rope = hf_layer_rope(GLOBAL, lambda c: c.global_heads[0], lambda dim: Rope(dim, 1e6, Proportional(0.25)))
    local_rope: Rope = hf_layer_rope(LOCAL, lambda c: c.head_dim, Rope)
    num_shared: int = hf("num_kv_shared_layers", 0)  # last layers, which take keys and values of earlier ones
    shared_wide: bool = hf("use_double_wide_mlp", False)  # their MLP is twice as wide
    per_layer_dim: int = _gemma4_fields.hf_per_layer()  # of a token's vector for each layer; 0: none
    per_layer_vocab: int = hf("vocab_size_per_layer_input", 262_144)
    sparse: bool = hf("enable_moe_block", False)  # experts beside the MLP
    num_experts: int | None = _gemma4_fields.hf_of_experts("num_experts")
    top_k: int | None = _gemma4_fields.hf_of_experts("top_k_experts")
    expert_dim: int | None = _gemma4_fields.hf_of_experts("moe_intermediate_size")
    final_softcap: float | None = hf("final_logit_softcapping", 30.0, absent=None)
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", True)
    attention_bias: bool = hf("attention_bias", False)
    # Tokens of an image attend to each other in both directions, in local layers.
    both_ways: bool = _gemma4_fields.hf_both_ways()
    pad_token: int | None = hf("pad_token_id", 0)  # whose vectors stand for placeholders of images and sound
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    vision: Vision | UnifiedVision | None = None
    audio: Audio | UnifiedAudio | None = None

    def __post_init__(self):
        super().__post_init__()
        for encoder in self.encoders:
            encoder.check(self)
        if self.types[-1] != GLOBAL:
            raise ValueError(f"layer_types must end with {GLOBAL}, got {self.types[-1]} for the last layer")
        self._check_shared()

    def _check_shared(self) -> None:
        """Raises ValueError unless the layers that take keys find some of their type; a drafter takes all of them."""
        own, got = self.types[: self.num_layers - self.num_shared], f"{self.num_shared} of {self.types}"
        if not 0 <= self.num_shared < self.num_layers or {*own} != {*self.types}:
            raise ValueError(f"num_shared (num_kv_shared_layers) must leave layers of each type, got {got}")

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
        own = self.num_layers - self.num_shared
        last = {kind: i for i, kind in enumerate(self.types[:own])} if self.num_shared else {}
        role = lambda i, kind: TAKES if i >= own else SHARES if last.get(kind) == i else OWN
        return tuple((kind, role(i, kind)) for i, kind in enumerate(self.types))

    @property
    def parts(self) -> dict[str, tuple[ops.Mask, Rope, tuple[int, int]]]:
        """Mask, rotary embedding, and width and number of the key heads of either type of layer."""
        # The window limits the past of images, too.
        causal = ops.Causal() | ops.BidirectionalBlocks() if self.vision and self.both_ways else ops.Causal()
        local = causal & ops.SlidingWindow(self.window), self.local_rope, (self.head_dim, self.num_kv_heads)
        return {LOCAL: local, GLOBAL: (ops.Causal(), self.rope, self.global_heads)}

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", *TEXT, *VISION_TYPES) not in VISION_TYPES:
            return super().from_hf(fields)
        text, tied = super().from_hf(fields.nested("text_config")), fields.take("tie_word_embeddings", True)
        return replace(text, tied=tied, vision=read_vision(fields), audio=read_audio(fields))

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json."""
        text = super().to_hf()
        if not self.encoders:
            return text
        del text["architectures"]
        text["model_type"] = f"{self.encoders[0].model_types[0]}_text"
        written = {"text_config": text, "tie_word_embeddings": self.tied}
        for encoder in self.encoders:
            written |= encoder.to_hf()
        return written


def _attention(cfg: Config, kind: str, role: str, *, rngs: nnx.Rngs) -> nn.Attention | nn.SharedKVAttention:
    (mask, rope, (H, K)), norm = cfg.parts[kind], lambda: nn.RMSNorm(H, eps=cfg.norm_eps)
    # Norms set the scale of queries and keys, so scores have no other factor.
    own: Any = dict(num_heads=cfg.num_heads, head_dim=H, num_kv_heads=K, mask=mask, rope=rope, q_norm=norm(), scale=1.0)
    own |= dict(bias=cfg.attention_bias, out_bias=cfg.attention_bias, rngs=rngs)
    if role == TAKES:
        return nn.SharedKVAttention(cfg.dim, **own)
    own |= dict(k_norm=norm(), v_norm=nn.norm.UnitRMSNorm(cfg.norm_eps))
    return nn.Attention(cfg.dim, **own, keys_as_values=cfg.keys_as_values and kind == GLOBAL)


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.router.ScaledRouter(cfg.dim, cfg.num_experts, top_k=cfg.top_k, eps=cfg.norm_eps, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, activation=ops.geglu, losses=cfg.losses, rngs=rngs)


class Block(nn.Layer):
    """Sandwich norms, as in Gemma 3; then experts beside the MLP, or a vector for this layer, and a factor."""

    def __init__(self, cfg: Config, kind: str, role: str, *, rngs: nnx.Rngs):
        norm = lambda: nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.kind, self.role = kind, role
        self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm = (norm() for _ in range(4))
        self.attn: Any = _attention(cfg, kind, role, rngs=rngs)
        wide = 2 if role == TAKES and cfg.shared_wide else 1
        self.mlp = nn.GatedMLP(cfg.dim, wide * cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if cfg.sparse else None
        if cfg.sparse:
            self.moe_norm, self.moe_post_norm, self.mlp_own_norm = norm(), norm(), norm()
        P = cfg.per_layer_dim
        self.per_layer = nn.per_layer.PerLayerGate(cfg.dim, P, eps=cfg.norm_eps, rngs=rngs) if P else None
        self.factor = nnx.Variable(jnp.ones(1), axes=("norm",))  # stored, but not trained

    def __call__(
        self, x: nn.stack.Carry, ctx: nn.Context, cache: Any = None, vector: Float[Array, "B T P"] | None = None
    ):
        h, cache, shared = self._attend(self.attn_norm(x.x), x, ctx, cache)
        # [B, T, D], the residual stream
        y = constrain(x.x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        h, aux = self.mlp(self.mlp_norm(y)), {}
        if self.moe is not None:
            # The router norms the stream in its own way.
            routed, aux = self.moe(self.moe_norm(y), ctx, routed_by=y)
            h = self.mlp_own_norm(h) + self.moe_post_norm(routed)
        y = y + self.mlp_post_norm(checkpoint_name(h, "mlp"))
        if self.per_layer is not None:
            y = y + self.per_layer(y, cast(Any, vector))
        y = y * jnp.asarray(self.factor[...][0], y.dtype)  # [1] -> []
        return x.updated(constrain(y, "batch", "seq", "act_embed"), **shared), cache, aux

    def _attend(self, h, x: nn.stack.Carry, ctx: nn.Context, cache: Any):
        """Returns the result of attention, the cache, and keys and values for later layers by their type."""
        if self.role == TAKES:
            # No cache: the sharing layer's has these keys already.
            return self.attn(h, ctx, x.shared[self.kind])[0], None, {}
        h, cache, kv = self.attn.with_kv(h, ctx, cache)
        return h, cache, {self.kind: kv} if self.role == SHARES else {}


class Gemma4(nn.Decoder):
    """Gemma 4: global layers have wider heads, of which a quarter is rotated; E models add a vector to every layer.

    With `cfg.vision` it reads images, with `cfg.audio` sound; their tokens count as positions like any other.
    """

    layers_share = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, self.softcap = cfg, cfg.final_softcap
        self.masks, self.ropes, _ = zip(*cfg.parts.values(), strict=True)
        self.layers_take_tokens = cfg.per_layer_dim > 0
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        sizes = cfg.per_layer_vocab, cfg.dim, cfg.num_layers, cfg.per_layer_dim
        self.per_layer = nn.per_layer.PerLayerEmbed(*sizes, eps=cfg.norm_eps, rngs=rngs) if cfg.per_layer_dim else None
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = _gemma4_towers.tower(cfg.vision, cfg.dim, rngs=rngs)
        self.audio_tower = _gemma4_conformer.audio_tower(cfg.audio, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(self._padded(tokens), dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)

    def ids_for_layers(self, tokens: Int[Array, "B T"]) -> dict[str, Array]:
        """Returns the ids as a keyword argument of `enter` if layers use them, else nothing."""
        return super().ids_for_layers(self._padded(tokens))

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images and the sound that the model reads, if it has encoders of them."""
        inputs, sees, hears = {}, self.cfg.vision, self.cfg.audio
        if sees is not None:
            inputs["images"] = nn.vision.PatchInput(
                self.tower,
                tokens=(sees.image_token, sees.video_token),
                merge=sees.merge,
                patch_dim=sees.patch_dim,
                bidirectional=self.cfg.both_ways,
            )
        if hears is not None:
            inputs["audio"] = nn.audio.AudioInput(
                self.audio_tower, hears.audio_token, frame_dim=hears.frame_dim, num_tokens=hears.num_tokens
            )
        return inputs

    def _padded(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Returns `tokens` with the id of padding in place of placeholders, whose own rows of tables are never used."""
        if not self.cfg.encoders:
            return tokens
        # Sound has placeholders in a model that only sees, too.
        stands = tokens == self.cfg.audio_token
        for reader in self.inputs.values():
            stands |= reader.is_placeholder(tokens)
        return jnp.where(stands, self.cfg.pad_token, tokens)

    def check_inputs(self, tokens: Int[Any, "B T"], **inputs: Any) -> None:
        """Raises ValueError as `nn.Decoder` does, for images that are too large, and for sound that nothing encodes."""
        super().check_inputs(tokens, **inputs)
        if self.cfg.vision is not None:
            self.cfg.vision.check_size(inputs.get("images"))
        if self.cfg.audio is None and self.cfg.audio_token is not None:
            nn.audio.check_no_audio(
                tokens == self.cfg.audio_token, "this Gemma4 does not hear (its config has no audio)"
            )

    def last_keys(self, cache: nn.cache.Cache) -> dict[str, nn.cache.Ordered]:
        """Returns by type the keys and values of the last layer that has its own, in the order of tokens, and what is
        added to a token's index to find it among them.
        """
        own = self.cfg.types[: self.cfg.num_layers - self.cfg.num_shared]
        last = {kind: self.layers.cache_of(i, cache.layers) for i, kind in enumerate(own)}
        return {kind: one.unrolled(cache.length) for kind, one in last.items()}

    def layer_inputs(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "L B T P"] | None:
        """Returns a vector of each token for each layer, if the model has them."""
        return None if self.per_layer is None else self.per_layer(x, cast(Any, ctx.tokens))


# fmt: off
_ROPES: Any = {"rope": Rope(512, 1e6, Proportional(0.25), max_length=262_144), "local_rope": Rope(256, max_length=262_144)}
_LARGE = Vision(dim=1152, mlp_dim=4304, num_layers=27, num_heads=16, num_kv_heads=16, head_dim=72, standardize=True)
_31B = Config(
    vocab=262_144, num_layers=60, dim=5376, mlp_dim=21_504, num_heads=32, num_kv_heads=16, head_dim=256, window=1024,
    keys_as_values=True, global_heads=(512, 4), both_ways=True, vision=_LARGE, **_ROPES)
_E2B = replace(
    _31B, num_layers=35, dim=1536, mlp_dim=6144, num_heads=8, num_kv_heads=1, window=512, keys_as_values=False,
    global_heads=(512, 1), **{name: replace(rope, max_length=131_072) for name, rope in _ROPES.items()},
    layer_types=pattern(35, period=5), num_shared=20, shared_wide=True, per_layer_dim=256, both_ways=False,
    vision=Vision(clipped=True), audio=Audio(),
)
PRESETS = {
    "gemma4-e2b": _E2B,
    "gemma4-e4b": replace(_E2B, num_layers=42, dim=2560, mlp_dim=10_240, num_kv_heads=2, global_heads=(512, 2),
                          layer_types=None, num_shared=18, shared_wide=False),
    "gemma4-12b": replace(_31B, num_layers=48, dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8,
                          global_heads=(512, 1), vision=UnifiedVision(), audio=UnifiedAudio()),
    "gemma4-26b-a4b": replace(_31B, num_layers=30, dim=2816, mlp_dim=2112, num_heads=16, num_kv_heads=8, sparse=True,
                              global_heads=(512, 2), num_experts=128, top_k=8, expert_dim=704),
    "gemma4-31b": _31B,
}
# fmt: on

FAMILY = Family(
    name="gemma4",
    model=Gemma4,
    config=Config,
    table=_gemma4_names.table,
    presets=PRESETS,
    model_types=(*TEXT, *VISION_TYPES),
)
