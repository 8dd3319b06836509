"""Mistral Small 4 (Mistral AI 2026): DeepSeek's latent attention with sharpened queries, many small experts, a
shared one, and Pixtral's image encoder.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _mistral_config as shared
from maxlib.models import _pixtral_vision as vision
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Multimodal, Table, fields, names

Vision = vision.Vision
MASK = ops.Causal()
_LENGTH = 1_048_576  # of a config that does not say


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Mistral 4; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    num_dense: int = 0  # number of first layers with a plain MLP
    dim: int
    mlp_dim: int
    expert_dim: int
    num_heads: int
    q_rank: int | None  # None: queries have no latent
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    sharpening: float
    num_experts: int
    num_shared: int = 1
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scale: float = 1.0
    norm_eps: float = 1e-6
    tied: bool = False
    losses: tuple[Any, ...] = ()  # router losses for training
    vision: Vision | None = None

    def __post_init__(self):
        shared.check_sharpened(self.rope, "mistral4")


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
        x = nn.residual(x, h, "attn")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return nn.residual(x, h, "mlp"), cache, aux


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.MLA:
    # The cache stores one latent [B, T, R] per token for all heads, R = 256, and one rotary key of 64.
    scale, scaling = (cfg.nope_dim + cfg.rope.dim) ** -0.5, cfg.rope.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= ops.yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2  # YaRN's temperature, on q and on k
    # The norms of the latents have the default epsilon, independent of `norm_eps`.
    return nn.MLA(
        cfg.dim,
        num_heads=cfg.num_heads,
        q_rank=cfg.q_rank,
        kv_rank=cfg.kv_rank,
        nope_dim=cfg.nope_dim,
        v_dim=cfg.v_dim,
        rope=cfg.rope,
        mask=MASK,
        scale=scale,
        temperature=shared.temperature(cfg.rope, cfg.sharpening),
        rngs=rngs,
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Softmax over all experts, renormalized over the top k; no balancing bias.
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        groups=groups,
        score=jax.nn.softmax,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        rngs=rngs,
    )
    shared_mlp = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs)  # applied to every token
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared_mlp, losses=cfg.losses, rngs=rngs)


class Mistral4(nn.Decoder):
    """Mistral Small 4: 119B parameters of which a token uses 7B, with a cache of 320 numbers per token and layer.

    With `cfg.vision` it reads images of any size; their tokens count like those of text.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        dense = [i < cfg.num_dense for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), dense, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = (
            None if cfg.vision is None else vision.PixtralVision(cfg.vision, cfg.dim, eps=cfg.norm_eps, rngs=rngs)
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (vision_config := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.PatchInput(
                self.tower,
                tokens=(vision_config.image_token,),
                merge=vision_config.merge,
                patch_dim=vision_config.patch_dim,
            )
        }


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    turned = hf.take("qk_rope_head_dim", 64)
    width = c.nope_dim + turned
    hf.require("head_dim", width)
    hf.require("qk_head_dim", width)
    shared.check_length(hf, _LENGTH)
    rope = fields.read_rope(
        hf,
        head_dim=width,
        interleaved=hf.take("rope_interleave", True),
        partial=True,
        default_fraction=turned / width,
        default_length=_LENGTH,
    )
    if rope.dim != turned:
        raise ValueError(
            f"{hf.where('partial_rotary_factor')} must be qk_rope_head_dim ({turned}) of {width}, got "
            f"{rope.dim / width}: it says the same."
        )
    return rope


def _write_rope(rope: Rope, cfg: Any) -> dict[str, Any]:
    width = cfg.nope_dim + rope.dim
    widths = {"qk_rope_head_dim": rope.dim, "head_dim": width, "rope_interleave": rope.interleaved}
    return widths | fields.write_rope(rope, head_dim=width, interleaved=rope.interleaved)


def _read_sharpening(hf: HFConfig, c: Any) -> float:
    return shared.read_sharpening(hf)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.MLA,
        Computed("rope", _read_rope, _write_rope),
        Computed("sharpening", _read_sharpening, lambda value, cfg: shared.written_sharpening(value)),
        fields.NUM_SHARED,
        *fields.GROUPS,
    ],
    model_types={"mistral4": "Mistral4ForCausalLM"},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "num_key_value_heads": fields.num_heads,
        "num_local_experts": lambda c: c.num_experts,
    },
    fixed_if_present={"mlp_bias": False, "scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1},
    absent={"q_rank": 1024, "kv_rank": 256, "nope_dim": 64, "v_dim": 128, "num_experts": 128, "top_k": 4},
)
FIELDS = Multimodal(TEXT, {"vision": vision.FIELDS}, model_types={vision.MERGING: shared.VISION_TYPES[vision.MERGING]})


def _table(cfg: Config) -> Table:
    # Releases have all experts of a layer in two tensors.
    experts: Any = names.with_fused_experts(names.MOE)
    return shared.table([*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *experts], cfg.vision)


# fmt: off
PRESETS = {
    "mistral-small-4-119b": Config(
        vocab=131_072, num_layers=36, dim=4096, mlp_dim=12_288, expert_dim=2048, num_heads=32,
        q_rank=1024, kv_rank=256, nope_dim=64, v_dim=128, sharpening=0.1, vision=Vision(),
        rope=Rope(64, 10_000.0, YarnScaling(128.0, 8192, mscale=1.0, mscale_all_dim=1.0), interleaved=True, max_length=_LENGTH),
        num_experts=128, top_k=4,
    )
}
# fmt: on

FAMILY = Family("mistral4", Mistral4, FIELDS, _table, PRESETS, model_types=("mistral4", "mistral3/mistral4"))
