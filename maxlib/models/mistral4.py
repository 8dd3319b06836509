"""Mistral Small 4 (Mistral AI 2026): DeepSeek's latent attention with sharpened queries, many small experts, a
shared one, and Pixtral's image encoder.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import _mistral_config as shared
from maxlib.models import _pixtral_vision as vision
from maxlib.models._layers import PreNorm, TextDecoder, deepseek_experts, latent_attention
from maxlib.models._sizes import ExpertSizes, RotatedLatentSizes
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Multimodal, Table, fields, names

Vision = vision.Vision
_LENGTH = 1_048_576  # of a config that does not say


@dataclass(frozen=True, kw_only=True)
class Config(RotatedLatentSizes, ExpertSizes):
    """Sizes of a Mistral 4; `PRESETS` has the published ones."""

    num_dense: int = 0  # number of first layers with a plain MLP
    sharpening: float
    num_shared: int = 1
    vision: Vision | None = None

    def __post_init__(self):
        shared.check_sharpened(self.rope, "mistral4")


class Block(PreNorm):
    """Pre-norm layer of latent attention, with an MLP in the first `num_dense` and experts in all others."""

    def __init__(self, cfg: Config, *, dense: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = latent_attention(
            cfg, rope=cfg.rope, temperature=shared.temperature(cfg.rope, cfg.sharpening), rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    groups = nn.router.GroupLimit(cfg.num_groups, cfg.top_groups) if cfg.top_groups < cfg.num_groups else None
    # Softmax over all experts, renormalized over the top k; no balancing bias.
    router = nn.Router(
        cfg.dim,
        cfg.num_experts,
        top_k=cfg.top_k,
        groups=groups,
        renormalize=cfg.renormalize,
        scale=cfg.routed_scale,
        rngs=rngs,
    )
    return deepseek_experts(cfg, router=router, rngs=rngs)


class Mistral4(PatchReader, TextDecoder):
    """Mistral Small 4: 119B parameters (7B active), with a cache of 320 numbers per token and layer.

    With `cfg.vision` it reads images of any size; their tokens count like those of text.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda dense, rngs: Block(cfg, dense=dense, rngs=rngs), cfg.dense, rngs=rngs)
        self.tower = (
            None if cfg.vision is None else vision.PixtralVision(cfg.vision, cfg.dim, eps=cfg.norm_eps, rngs=rngs)
        )


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
    fixed_if_present={"scoring_func": "softmax", "topk_method": "greedy"},
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
