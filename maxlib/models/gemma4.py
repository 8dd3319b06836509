"""Gemma 4 (Google DeepMind 2026): wide global layers whose keys are values, keys shared by layers, a vector per layer.

It reads images of any size, and E2B, E4B and 12B read sound.
"""

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models import _gemma4_audio, _gemma4_config, _gemma4_vision
from maxlib.models._gemma4_audio import Audio as Audio
from maxlib.models._gemma4_audio import UnifiedAudio as UnifiedAudio
from maxlib.models._gemma4_config import GLOBAL, SHARES, TAKES, pattern
from maxlib.models._gemma4_config import LOCAL as LOCAL
from maxlib.models._gemma4_config import Config as Config
from maxlib.models._gemma4_vision import UnifiedVision as UnifiedVision
from maxlib.models._gemma4_vision import Vision as Vision
from maxlib.ops import ProportionalScaling, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family


class Block(nn.Layer):
    """Sandwich norms, as in Gemma 3; then experts beside the MLP, or a vector for this layer, and a factor."""

    def __init__(self, cfg: Config, kind: str, role: str, *, rngs: nnx.Rngs):
        self.kind, self.role = kind, role
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn: Any = _attention(cfg, kind, role, rngs=rngs)
        wide = 2 if role == TAKES and cfg.shared_wide else 1
        self.mlp = nn.GatedMLP(cfg.dim, wide * cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if cfg.sparse else None
        if cfg.sparse:
            self.moe_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
            self.moe_post_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
            self.mlp_own_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        P = cfg.per_layer_dim
        self.per_layer = nn.per_layer.PerLayerGate(cfg.dim, P, eps=cfg.norm_eps, rngs=rngs) if P else None
        self.factor = nnx.Variable(jnp.ones(1), axes=("norm",))  # stored, but not trained

    def __call__(
        self, x: nn.stack.Carry, ctx: nn.Context, cache: Any = None, vector: Float[Array, "B T P"] | None = None
    ):
        h, cache, shared = self._attend(self.attn_norm(x.x), x, ctx, cache)
        y = nn.residual(x.x, h, "attn", norm=self.attn_post_norm)  # [B, T, D], the residual stream
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


def _attention(cfg: Config, kind: str, role: str, *, rngs: nnx.Rngs) -> nn.Attention | nn.SharedKVAttention:
    mask, rope, (H, K) = cfg.parts[kind]
    if role == TAKES:
        return nn.SharedKVAttention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=K,
            head_dim=H,
            mask=mask,
            rope=rope,
            q_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
            scale=1.0,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
    return nn.Attention(
        cfg.dim,
        num_heads=cfg.num_heads,
        num_kv_heads=K,
        head_dim=H,
        mask=mask,
        rope=rope,
        q_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
        k_norm=nn.RMSNorm(H, eps=cfg.norm_eps),
        v_norm=nn.norm.UnitRMSNorm(cfg.norm_eps),
        scale=1.0,  # norms set the scale of queries and keys
        keys_as_values=cfg.keys_as_values and kind == GLOBAL,
        bias=cfg.attention_bias,
        out_bias=cfg.attention_bias,
        rngs=rngs,
    )


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    router = nn.router.ScaledRouter(cfg.dim, cfg.num_experts, top_k=cfg.top_k, eps=cfg.norm_eps, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, activation=ops.geglu, losses=cfg.losses, rngs=rngs)


def _per_layer_embed(cfg: Config, *, rngs: nnx.Rngs) -> nn.per_layer.PerLayerEmbed:
    return nn.per_layer.PerLayerEmbed(
        cfg.per_layer_vocab, cfg.dim, cfg.num_layers, cfg.per_layer_dim, eps=cfg.norm_eps, rngs=rngs
    )


class Gemma4(nn.Decoder):
    """Gemma 4: global layers have wider heads and rotate a quarter of each; E models add a vector to every layer.

    With `cfg.vision` it reads images, with `cfg.audio` sound; their tokens count as positions like any other.
    """

    layers_share = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, self.softcap = cfg, cfg.final_softcap
        self.layers_take_tokens = cfg.per_layer_dim > 0
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.per_layer = _per_layer_embed(cfg, rngs=rngs) if cfg.per_layer_dim else None
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = _gemma4_vision.tower(cfg.vision, cfg.dim, rngs=rngs)
        self.audio_tower = _gemma4_audio.audio_tower(cfg.audio, cfg.dim, rngs=rngs)

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
        inputs, vision_config, audio_config = {}, self.cfg.vision, self.cfg.audio
        if vision_config is not None:
            inputs["images"] = nn.vision.PatchInput(
                self.tower,
                tokens=(vision_config.image_token, vision_config.video_token),
                merge=vision_config.merge,
                patch_dim=vision_config.patch_dim,
                bidirectional=self.cfg.both_ways,
            )
        if audio_config is not None:
            inputs["audio"] = nn.audio.AudioInput(
                self.audio_tower,
                audio_config.audio_token,
                frame_dim=audio_config.frame_dim,
                num_tokens=audio_config.num_tokens,
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
        types = self.cfg.types[: self.cfg.num_layers - self.cfg.num_shared]
        last = {kind: self.layers.cache_of(i, cache.layers) for i, kind in enumerate(types)}
        return {kind: layer_cache.unrolled(cache.length) for kind, layer_cache in last.items()}

    def layer_inputs(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "L B T P"] | None:
        """Returns a vector of each token for each layer, if the model has them."""
        return None if self.per_layer is None else self.per_layer(x, cast(Any, ctx.tokens))


# fmt: off
_LARGE = Vision(dim=1152, mlp_dim=4304, num_layers=27, num_heads=16, num_kv_heads=16, head_dim=72, standardize=True)
_31B = Config(
    vocab=262_144, num_layers=60, dim=5376, mlp_dim=21_504, num_heads=32, num_kv_heads=16, head_dim=256, window=1024,
    keys_as_values=True, global_heads=(512, 4), both_ways=True, vision=_LARGE,
    rope=Rope(512, 1e6, ProportionalScaling(0.25), max_length=262_144), local_rope=Rope(256, max_length=262_144),
)
_E2B = replace(
    _31B, num_layers=35, dim=1536, mlp_dim=6144, num_heads=8, num_kv_heads=1, window=512, keys_as_values=False,
    global_heads=(512, 1), rope=replace(_31B.rope, max_length=131_072),
    local_rope=replace(_31B.local_rope, max_length=131_072), layer_types=pattern(35, period=5), num_shared=20,
    shared_wide=True, per_layer_dim=256, both_ways=False, vision=Vision(clipped=True), audio=Audio(),
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

FIELDS = _gemma4_config.FIELDS
FAMILY = Family("gemma4", Gemma4, FIELDS, _gemma4_config.table, PRESETS)
