"""Qwen3-VL (Qwen team 2025, arXiv:2511.21631), dense and with experts: Qwen3's text, and images of any size.

Tokens have positions by time, row and column (M-RoPE). Features of three layers of the image encoder are added to the
tokens of images after the first three layers of text (deepstack).
"""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _qwen_vision as vision
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Convert, Family, HFConfig, ModelConfig, Table, Weight, hf, hf_fields, hf_rope, names

Vision = vision.Vision

DENSE, SPARSE = "qwen3_vl", "qwen3_vl_moe"
SECTIONS = (24, 20, 20)  # of M-RoPE: pairs of a head that turn by time, row and column
MASK = ops.Causal()
TEXT = "model.language_model"  # before names of text


def _sparse(name: str, kind: type, *aliases: str) -> Any:
    """Declares a size of models with experts; None in the others."""

    def read(fields: HFConfig, c: Any) -> Any:
        if fields.take("model_type") != f"{SPARSE}_text":
            return None
        spelled = [other for other in (name, *aliases) if other in fields] or [name]
        return fields.take(spelled[0], kind=kind)

    return hf_fields(read, lambda value, cfg: {} if value is None else {name: value}, default=None)


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Qwen3-VL; `PRESETS` has the published ones."""

    model_types = (f"{DENSE}_text", f"{SPARSE}_text")
    fixed = {"hidden_act": "silu"}
    # transformers renormalises weights of experts whatever the releases say of it.
    fixed_if_present = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ([],)}
    fixed_if_present |= {"use_sliding_window": False, "sliding_window": None}

    vocab: int = hf("vocab_size", absent=151_936)
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")  # not used by models with experts
    expert_dim: int | None = _sparse("moe_intermediate_size", int)
    num_experts: int | None = _sparse("num_experts", int, "num_local_experts")
    top_k: int | None = _sparse("num_experts_per_tok", int)
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=lambda c: 128 if c.num_experts is None else c.dim // c.num_heads)
    rope: Rope = hf_rope(default_theta=500_000.0, default_length=128_000)
    sections: tuple[int, ...] = vision.hf_sections(SECTIONS)
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", False)
    attention_bias: bool = hf("attention_bias", False)
    vision: Vision
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`

    def __post_init__(self):
        super().__post_init__()
        self.mrope  # noqa: B018  # its sections are checked
        if len(self.vision.deepstack) > self.num_layers:
            raise ValueError(
                f"deepstack (deepstack_visual_indexes) must feed at most the {self.num_layers} layers of text "
                f"(num_hidden_layers), got {self.vision.deepstack}"
            )

    @property
    def kind(self) -> str:
        """DENSE or SPARSE."""
        return DENSE if self.num_experts is None else SPARSE

    @property
    def mrope(self) -> ops.MRope:
        """The rotary embedding of all layers."""
        return ops.MRope(self.rope, self.sections)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        kind, text = fields.require("model_type", DENSE, SPARSE), fields.nested("text_config")
        text.require("model_type", f"{kind}_text")
        tied = fields.take("tie_word_embeddings", False)  # the text's own counts for nothing
        fields.nested("vision_config").take("deepstack_visual_indexes", kind=list)
        sees = Vision.read(fields, text.take("hidden_size", kind=int), kind)
        for name, allowed in (*cls.fixed.items(), *cls.fixed_if_present.items()):
            text.require(name, *(allowed if isinstance(allowed, tuple) else (allowed,)))
        return cls(**cls._read(text) | {"tied": tied}, vision=sees)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        text = super().to_hf() | {"model_type": f"{self.kind}_text"}
        name = "Qwen3VLForConditionalGeneration" if self.kind == DENSE else "Qwen3VLMoeForConditionalGeneration"
        own = {"architectures": [name], "model_type": self.kind, "tie_word_embeddings": self.tied}
        return own | {"text_config": text} | self.vision.written(self.dim, self.kind)


def _experts(cfg: Any, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all E experts, of which a token takes the best k. Files have experts transposed.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, losses=cfg.losses, weight_order="EIO", rngs=rngs)


class Block(nn.Layer):
    """Qwen3's layer, with experts or with an MLP; `added` comes from the image encoder."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        norm = lambda: nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps)  # one scale [H] for all heads
        own: Any = dict(mask=MASK, rope=cfg.mrope, bias=bias, out_bias=bias, q_norm=norm(), k_norm=norm())
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, **heads, **own, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if cfg.num_experts is None else None
        self.moe: Any = None if cfg.num_experts is None else _experts(cfg, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        ctx: nn.Context,
        cache: Any = None,
        added: Float[Array, "B T D"] | None = None,
    ):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        x = x + checkpoint_name(h, "mlp")
        return constrain(x if added is None else x + added, "batch", "seq", "act_embed"), cache, aux


class Qwen3VL(nn.Decoder):
    """Qwen3-VL: Qwen3 that sees images of any size; frames of a video are images with their time in the text before."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (MASK,), (cfg.mrope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        # The first layers get features of images, so they are scanned by themselves.
        has_features = [i < len(cfg.vision.deepstack) for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), has_features, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.tower = vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads."""
        sees = self.cfg.vision
        return {
            "images": nn.vision.PatchInput(
                self.tower,
                tokens=(sees.image_token, sees.video_token),
                merge=sees.merge,
                patch_dim=sees.patch_dim,
                mrope=True,
            )
        }


def _experts_table(cfg: Any) -> tuple[list[Weight], list[Convert]]:
    """Lists what a layer's experts are called, and how they are read.

    Releases have them transposed, `E D 2F` and `E F D`. transformers writes `E 2F D` and `E D F` under the same names,
    and reads both: what has not the shape that it would write is transposed. So does this; exports are like releases,
    but for sizes with which that could not be told.
    """
    D, F, gate_up, down = cfg.dim, cfg.expert_dim, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    halves = "E D (two F) -> E D F" if D != 2 * F else "E (two F) D -> E D F"
    entries = [
        Weight(gate_up, "moe.gate.w", halves, at={"two": 0}),
        Weight(gate_up, "moe.up.w", halves, at={"two": 1}),
        Weight(down, "moe.down.w", "E F D -> E F D" if D != F else "E D F -> E F D"),
    ]
    turned = lambda x, rows: x.swapaxes(1, 2) if x.shape[1] == rows else x
    loads = {
        "gate": (gate_up, lambda both: turned(both, 2 * F)[:, :, :F]),
        "up": (gate_up, lambda both: turned(both, 2 * F)[:, :, F:]),
        "down": (down, lambda one: turned(one, D)),
    }
    name = lambda hf_name: (f"{TEXT}.layers.{{i}}.{hf_name}",)
    return entries, [
        Convert(name(hf_name), f"layers.{{i}}.moe.{part}.w", load, batch=1, dtype=None)
        for part, (hf_name, load) in loads.items()
    ]


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.ATTENTION, *names.MLP, Weight("mlp.gate.weight", "moe.router.gate.w")]
    experts, either_way = ([], []) if cfg.num_experts is None else _experts_table(cfg)
    return [*names.decoder_table([*layer, *experts], model=TEXT), *either_way, *vision.table()]


# fmt: off
_TOKENS: Any = dict(image_token=151_655, video_token=151_656, start_token=151_652, end_token=151_653)
_SMALL = Vision(dim=1024, num_layers=24, mlp_dim=4096, deepstack=(5, 11, 17), **_TOKENS)
_LARGE = Vision(deepstack=(8, 16, 24), **_TOKENS)
_8B = Config(
    vocab=151_936, num_layers=36, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 5_000_000.0, max_length=262_144), vision=_LARGE,
)
_30B = replace(
    _8B, num_layers=48, dim=2048, mlp_dim=6144, num_kv_heads=4, expert_dim=768, num_experts=128, top_k=8,
)
PRESETS = {
    "qwen3-vl-2b": replace(_8B, num_layers=28, dim=2048, mlp_dim=6144, num_heads=16, tied=True, vision=_SMALL),
    "qwen3-vl-4b": replace(_8B, dim=2560, mlp_dim=9728, tied=True, vision=_SMALL),
    "qwen3-vl-8b": _8B,
    "qwen3-vl-32b": replace(_8B, num_layers=64, dim=5120, mlp_dim=25_600, num_heads=64),
    "qwen3-vl-30b-a3b": _30B,
    "qwen3-vl-235b-a22b": replace(
        _30B, num_layers=94, dim=4096, mlp_dim=12_288, num_heads=64, expert_dim=1536,
    ),
}
# fmt: on

FAMILY = Family(
    name="qwen3_vl", model=Qwen3VL, config=Config, table=_table, presets=PRESETS, model_types=(DENSE, SPARSE)
)
