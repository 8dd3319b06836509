"""Mistral Small 4 (Mistral AI 2026): DeepSeek's latent attention with sharpened queries, many small experts, a
shared one, and Pixtral's image encoder.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _mistral_config as shared
from maxlib.models import _pixtral_vision as vision
from maxlib.ops import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, ModelConfig, Table, hf, hf_fields, names, rope_to_hf

Vision = vision.Vision
MASK = ops.Causal()
_LENGTH = 1_048_576  # of a config that does not say


def _read_rope(fields: HFConfig, c: Any) -> Rope:
    turned = fields.take("qk_rope_head_dim", 64)
    width = c.nope_dim + turned
    fields.require("head_dim", width)
    fields.require("qk_head_dim", width)
    shared.check_length(fields, _LENGTH)
    spelling: Any = dict(partial=True, default_fraction=turned / width, default_length=_LENGTH)
    rope = fields.rope(head_dim=width, interleaved=fields.take("rope_interleave", True), **spelling)
    if rope.dim != turned:
        raise ValueError(
            f"{fields.where('partial_rotary_factor')} must be qk_rope_head_dim ({turned}) of {width}, got "
            f"{rope.dim / width}: it says the same."
        )
    return rope


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    width = cfg.nope_dim + rope.dim
    own = {"qk_rope_head_dim": rope.dim, "head_dim": width, "rope_interleave": rope.interleaved}
    return own | rope_to_hf(rope, head_dim=width, interleaved=rope.interleaved)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Mistral 4; `PRESETS` has the published ones."""

    model_types = ("mistral4",)
    architecture = "Mistral4ForCausalLM"
    fixed = {"hidden_act": "silu", "attention_bias": False}
    fixed_if_present = {"mlp_bias": False, "scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    num_dense: int = hf("first_k_dense_replace", 0)  # number of first layers with a plain MLP
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    expert_dim: int = hf("moe_intermediate_size")
    num_heads: int = hf("num_attention_heads", same=("num_key_value_heads",))
    q_rank: int | None = hf("q_lora_rank", absent=1024)  # None: queries have no latent
    kv_rank: int = hf("kv_lora_rank", absent=256)
    nope_dim: int = hf("qk_nope_head_dim", absent=64)
    v_dim: int = hf("v_head_dim", absent=128)
    rope: Rope = hf_fields(_read_rope, _write_rope)
    sharpening: float = hf_fields(
        lambda fields, c: shared.read_sharpening(fields), lambda value, cfg: shared.written_sharpening(value)
    )
    num_experts: int = hf("n_routed_experts", absent=128, same=("num_local_experts",))
    num_shared: int = hf("n_shared_experts", 1)
    top_k: int = hf("num_experts_per_tok", absent=4)
    num_groups: int = hf("n_group", 1)
    top_groups: int = hf("topk_group", 1)
    renormalize: bool = hf("norm_topk_prob", True)
    routed_scale: float = hf("routed_scaling_factor", 1.0)
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    losses: tuple[Any, ...] = ()  # router losses for training
    vision: Vision | None = None

    def __post_init__(self):
        super().__post_init__()
        shared.check_sharpened(self.rope, "mistral4")

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", *cls.model_types, vision.MERGING) != vision.MERGING:
            return super().from_hf(fields)
        return shared.read_seeing(fields, super().from_hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json."""
        return shared.written_seeing(super().to_hf(), self.vision)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    # The cache stores one latent [B, T, R] per token for all heads, R = 256, and one rotary key of 64.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    sharp = {"scale": scale, "temperature": shared.temperature(cfg.rope, cfg.sharpening)}
    ranks: Any = dict(q_rank=cfg.q_rank, kv_rank=cfg.kv_rank, nope_dim=cfg.nope_dim, v_dim=cfg.v_dim)
    # The norms of the latents have the default epsilon, independent of `norm_eps`.
    return nn.MLA(cfg.dim, num_heads=cfg.num_heads, **ranks, rope=cfg.rope, mask=MASK, **sharp, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Scores are a softmax over all experts, of which the best share the weight; no bias evens the load.
    choice: Any = dict(score=jax.nn.softmax, renormalize=cfg.renormalize, scale=cfg.routed_scale)
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, groups=groups, **choice, rngs=rngs)
    always = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=always, losses=cfg.losses, rngs=rngs)


class Block(nn.Layer):
    """Pre-norm layer of latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux


class Mistral4(nn.Decoder):
    """Mistral Small 4: 119B parameters of which a token uses 7B, with a cache of 320 numbers per token and layer.

    With `cfg.vision` it reads images of any size; their tokens count like those of text.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (MASK,), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        sees: Any = dict(eps=cfg.norm_eps, rngs=rngs)
        self.tower = None if cfg.vision is None else vision.PixtralVision(cfg.vision, cfg.dim, **sees)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (sees := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.PatchInput(
                self.tower, tokens=(sees.image_token,), merge=sees.merge, patch_dim=sees.patch_dim
            )
        }


def _table(cfg: Config) -> Table:
    # Releases have all experts of a layer in two tensors.
    experts: Any = names.with_fused_experts(names.MOE)
    return shared.table([*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *experts], cfg.vision)


# fmt: off
PRESETS = {
    "mistral-small-4-119b": Config(
        vocab=131_072, num_layers=36, dim=4096, mlp_dim=12_288, expert_dim=2048, num_heads=32,
        q_rank=1024, kv_rank=256, nope_dim=64, v_dim=128, sharpening=0.1, vision=Vision(),
        rope=Rope(64, 10_000.0, Yarn(128.0, 8192, mscale=1.0, mscale_all_dim=1.0), interleaved=True, max_length=_LENGTH),
        num_experts=128, top_k=4,
    )
}
# fmt: on

FAMILY = Family(
    name="mistral4",
    model=Mistral4,
    config=Config,
    table=_table,
    presets=PRESETS,
    model_types=(*Config.model_types, f"{vision.MERGING}/mistral4"),
)
