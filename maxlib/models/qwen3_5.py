"""Qwen3.5 (Qwen team 2026), dense and with experts: three layers of gated DeltaNet, then one of gated attention.

It takes images of any size. Image tokens have positions by time, row and column (M-RoPE); text tokens have three equal
positions, which is plain RoPE. The multi-token prediction module is loaded only with `num_mtp=1`; it takes text only.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _qwen_vision as vision
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import (
    Family,
    HFConfig,
    Ignore,
    ModelConfig,
    Renamed,
    Table,
    Weight,
    hf,
    hf_fields,
    hf_layer_types,
    hf_mtp,
    hf_rope,
    names,
)

Vision = vision.Vision

LINEAR, FULL = "linear_attention", "full_attention"
DENSE, SPARSE = "qwen3_5_text", "qwen3_5_moe_text"
VISION_TYPES = ("qwen3_5", "qwen3_5_moe")  # vision models, with the text model's fields in `text_config`
SECTIONS = (11, 11, 10)  # of M-RoPE


def _pattern(num_layers: int, period: int = 4) -> tuple[str, ...]:
    return tuple(LINEAR if (i + 1) % period else FULL for i in range(num_layers))


def _by_interval(fields: HFConfig, c: Any) -> tuple[str, ...]:
    if (period := fields.take("full_attention_interval", 4)) < 1:
        raise ValueError(f"{fields.where('full_attention_interval')} must be at least 1, got {period}.")
    return _pattern(c.num_layers, period)


def _of(kind: str, name: str, absent: int) -> Any:
    """Declares a size that only dense models or only models with experts have; None in the others."""
    read = lambda fields, c: fields.take(name, absent) if fields.take("model_type") == kind else None
    return hf_fields(read, lambda value, cfg: {} if value is None else {name: value}, default=None)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Qwen3.5; `PRESETS` has the published ones. Multimodal checkpoints keep them in `text_config`."""

    model_types = (DENSE, SPARSE)
    fixed = {"hidden_act": "silu"}
    fixed_if_present = {
        "attn_output_gate": True,
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": ([],),
        "mtp_use_dedicated_embeddings": False,
    }
    ignored = ("mamba_ssm_dtype",)  # the dtype of the state

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int | None = _of(DENSE, "intermediate_size", 12_288)
    expert_dim: int | None = _of(SPARSE, "moe_intermediate_size", 512)
    shared_dim: int | None = _of(SPARSE, "shared_expert_intermediate_size", 512)
    num_experts: int | None = _of(SPARSE, "num_experts", 256)
    top_k: int | None = _of(SPARSE, "num_experts_per_tok", 8)
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=256)
    rope: Rope = hf_rope(partial=True, default_fraction=0.25)
    sections: tuple[int, ...] = vision.hf_sections(SECTIONS)
    num_key_heads: int = hf("linear_num_key_heads", 16)  # of linear attention ...
    num_value_heads: int = hf("linear_num_value_heads", absent=32)
    key_dim: int = hf("linear_key_head_dim", 128)
    value_dim: int = hf("linear_value_head_dim", 128)
    conv_width: int = hf("linear_conv_kernel_dim", 4)  # ... and of the convolution before it
    # LINEAR or FULL for each layer; None: every fourth is FULL.
    layer_types: tuple[str, ...] | None = hf_layer_types(
        LINEAR, FULL, usual=lambda c: _pattern(c.num_layers), absent=_by_interval
    )
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", False)
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`
    vision: Vision | None = None
    num_mtp: int = 0  # 1: with the multi-token prediction module (`predict_ahead`) ...
    stored_mtp: int = hf_mtp(absent=0, field="mtp_num_hidden_layers")  # ... if the checkpoint has it

    def __post_init__(self):
        super().__post_init__()
        if self.num_mtp not in (0, 1):
            raise ValueError(f"num_mtp must be 0 or 1, the one module of the releases, got {self.num_mtp}")
        if self.vision is not None and self.vision.deepstack:
            raise ValueError(f"deepstack (deepstack_visual_indexes) must be empty, got {self.vision.deepstack}")
        self.rotary  # noqa: B018  # its sections are checked

    @property
    def rotary(self) -> Rope | ops.MRope:
        """The rotary embedding of all layers; with three positions per token in a vision model."""
        return self.rope if self.vision is None else ops.MRope(self.rope, self.sections)

    @property
    def types(self) -> tuple[str, ...]:
        """LINEAR or FULL for each layer."""
        return self.layer_types or _pattern(self.num_layers)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if fields.require("model_type", DENSE, SPARSE, *VISION_TYPES) not in VISION_TYPES:
            return super().from_hf(fields)
        text = super().from_hf(fields.nested("text_config"))
        tied = fields.take("tie_word_embeddings", text.tied)
        return replace(text, tied=tied, vision=Vision.read(fields, text.dim, *VISION_TYPES))

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json."""
        kind, name = (DENSE, "Qwen3_5For") if self.num_experts is None else (SPARSE, "Qwen3_5MoeFor")
        # A missing field means a quarter, and `hf_rope` writes none for a rope over whole heads.
        text = {"partial_rotary_factor": 1.0} | super().to_hf() | {"model_type": kind}
        if self.vision is None:
            return {"architectures": [name + "CausalLM"]} | text
        kind = kind.removesuffix("_text")
        own = {"architectures": [name + "ConditionalGeneration"], "model_type": kind, "tie_word_embeddings": self.tied}
        return own | {"text_config": text} | self.vision.written(self.dim, kind)


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.Attention:
    heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
    norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True)  # one scale [H] for all heads
    options: Any = dict(bias=cfg.attention_bias, out_bias=cfg.attention_bias, q_norm=norm(), k_norm=norm())
    # The rope rotates the first quarter of each head; the output gate has one value per head and dimension.
    return nn.Attention(cfg.dim, **heads, rope=cfg.rotary, out_gate_act=jax.nn.sigmoid, **options, rngs=rngs)


def _delta_net(cfg: Config, *, rngs: nnx.Rngs) -> nn.GatedDeltaNet:
    heads: Any = dict(num_heads=cfg.num_value_heads, num_key_heads=cfg.num_key_heads)
    widths: Any = dict(key_dim=cfg.key_dim, value_dim=cfg.value_dim, conv_width=cfg.conv_width)
    return nn.GatedDeltaNet(cfg.dim, **heads, **widths, norm_eps=cfg.norm_eps, rngs=rngs)


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts; each token uses the best k, and the shared expert, scaled by its own gate.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.shared_dim, rngs=rngs)
    own: Any = dict(router=router, shared=shared, shared_gate=True, losses=cfg.losses)
    return nn.MoE(cfg.dim, cfg.expert_dim, **own, rngs=rngs)


class Block(nn.Layer):
    """Mixes tokens by linear attention or attention, then passes each through experts or an MLP."""

    def __init__(self, cfg: Config, kind: str, *, rngs: nnx.Rngs):
        norm = lambda: nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm()
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == FULL else None
        self.delta: Any = _delta_net(cfg, rngs=rngs) if kind == LINEAR else None
        self.mlp_norm = norm()
        self.mlp: Any = None if cfg.mlp_dim is None else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = None if cfg.num_experts is None else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = (self.attn or self.delta)(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns an empty cache: keys and values, or a state."""
        return (self.attn or self.delta).init_cache(batch, capacity, dtype)


class Qwen35(nn.Decoder):
    """Qwen3.5: every fourth layer caches keys and values, the others a state; with `cfg.vision`, a vision model."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (ops.Causal(),), (cfg.rotary,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.types, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = None if cfg.vision is None else vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)
        ahead = lambda: nn.mtp.MTP(
            cfg.dim, block=Block(cfg, FULL, rngs=rngs), eps=cfg.norm_eps, plus_one=True, rngs=rngs
        )
        self.mtp = nnx.List([ahead() for _ in range(cfg.num_mtp)])

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, if it has an encoder of them."""
        if (sees := self.cfg.vision) is None:
            return {}
        return {
            "images": nn.vision.PatchInput(
                self.tower,
                tokens=(sees.image_token, sees.video_token),
                merge=sees.merge,
                patch_dim=sees.patch_dim,
                mrope=True,
            )
        }


def _linear_attention(cfg: Config) -> list[Weight]:
    heads = {"keys": (cfg.num_key_heads, cfg.key_dim), "values": (cfg.num_value_heads, cfg.value_dim)}
    return [
        *names.queries_keys_values("linear_attn.in_proj_qkv.weight", "delta.{}.w", "D", **heads),
        Weight("linear_attn.in_proj_z.weight", "delta.gate.w", "(N H) D -> N H D"),
        Weight("linear_attn.in_proj_b.weight", "delta.b.w"),
        Weight("linear_attn.in_proj_a.weight", "delta.a.w"),
        *names.queries_keys_values(*names.CONV1D, **heads),
        *names.LINEAR_ATTENTION,
    ]


def _table(cfg: Config) -> Table:
    # Entries for parts that a layer lacks (attention or DeltaNet, experts or an MLP) are ignored.
    layer = [*names.NORMS, *names.gated_attention(cfg.head_dim), *_linear_attention(cfg)]
    layer += [*names.MLP, *names.EXPERTS, *names.GATED_SHARED_EXPERT]
    ahead = names.qwen_mtp_table(layer, used=cfg.num_mtp)
    if cfg.vision is None:
        # A text model can also be loaded from a vision model's checkpoint.
        blind = [Renamed("model.language_model.", "model."), Ignore("model.visual.*")]
        return [*names.decoder_table(layer), *names.fused_experts("model"), *blind, *ahead]
    text = "model.language_model"
    return [*names.decoder_table(layer, model=text), *names.fused_experts(text), *vision.table(), *ahead]


def _vision(**sizes: Any) -> Vision:
    return Vision(image_token=248_056, video_token=248_057, start_token=248_053, end_token=248_054, **sizes)


def _sized(dim: int, num_layers: int, heads: tuple[int, int], num_value_heads: int, **more: Any) -> Config:
    num_heads, num_kv_heads = heads
    sizes: Any = dict(dim=dim, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=256)
    sizes |= dict(rope=Rope(64, 10_000_000.0, max_length=262_144), vision=_vision())
    return Config(vocab=248_320, num_value_heads=num_value_heads, **sizes | more)


# fmt: off
_SMALL = _vision(dim=1024, num_layers=24, mlp_dim=4096)
_27B = _sized(5120, 64, (24, 4), 48, mlp_dim=17_408)
_35B = _sized(2048, 40, (16, 2), 32, expert_dim=512, shared_dim=512, num_experts=256, top_k=8)
PRESETS = {
    "qwen3.5-0.8b": _sized(
        1024, 24, (8, 2), 16, mlp_dim=3584, tied=True, vision=_vision(dim=768, num_layers=12, num_heads=12, mlp_dim=3072)
    ),
    "qwen3.5-2b": _sized(2048, 24, (8, 2), 16, mlp_dim=6144, tied=True, vision=_SMALL),
    "qwen3.5-4b": _sized(2560, 32, (16, 4), 32, mlp_dim=9216, tied=True, vision=_SMALL),
    "qwen3.5-9b": _sized(4096, 32, (16, 4), 32, mlp_dim=12_288),
    "qwen3.5-27b": _27B, "qwen3.6-27b": _27B, "qwen3.8-27b": _27B,
    "qwen3.5-35b-a3b": _35B, "qwen3.6-35b-a3b": _35B,
    "qwen3.5-122b-a10b": _sized(
        3072, 48, (32, 2), 64, expert_dim=1024, shared_dim=1024, num_experts=256, top_k=8
    ),
    "qwen3.5-397b-a17b": _sized(
        4096, 60, (32, 2), 64, expert_dim=1024, shared_dim=1024, num_experts=512, top_k=10
    ),
}
# fmt: on

FAMILY = Family(
    name="qwen3_5",
    model=Qwen35,
    config=Config,
    table=_table,
    presets=PRESETS,
    model_types=(DENSE, SPARSE, *VISION_TYPES),
)
