"""Qwen3.8-Flash-Next (Qwen team 2026, `qwen4_exp`): three layers of gated DeltaNet, then one of attention to chosen
blocks of keys, on a residual of four streams to which one layer adds embeddings of hashed n-grams.

It takes images of any size, as Qwen3.5 does. The prediction module of the release is not built.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _qwen4_exp_files as files
from maxlib.models import _qwen_vision as vision
from maxlib.models._layers import TextDecoder, delta_net, gated_shared_experts
from maxlib.models._sizes import AttentionSizes, DeltaSizes, SparseSizes
from maxlib.models._vision import PatchReader
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Multimodal, fields

Vision = vision.Vision
LINEAR, INDEXED = files.LINEAR, files.INDEXED
SECTIONS = (11, 11, 10)  # rotated pairs of a head that M-RoPE turns by time, by row and by column


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, DeltaSizes, SparseSizes, files.StreamSizes):
    """Sizes of a Qwen3.8-Flash-Next; `PRESETS` has the published one."""

    layer_types: tuple[str, ...] | None = None  # LINEAR or INDEXED for each layer; None: every fourth is INDEXED
    sections: tuple[int, ...] = SECTIONS
    linear_gate: str = "silu"  # activation of the output's gate in LINEAR layers, "silu" or "sigmoid"
    shared_dim: int
    renormalize: ClassVar[bool] = True
    vision: Vision | None = None

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.linear_gate not in ("silu", "sigmoid"):
            raise ValueError(f"linear_gate (output_gate_type) must be silu or sigmoid, got {self.linear_gate!r}")
        files.check_ngrams(self)
        if self.vision is not None and self.vision.deepstack:
            raise ValueError(f"deepstack (deepstack_visual_indexes) must be empty, got {self.vision.deepstack}")

    @property
    def kinds(self) -> list[tuple[str, int | None]]:
        """The type of each layer, and the number of its table of n-grams, None for none."""
        types, numbers = self.layer_types or files.usual_types(self.num_layers), sorted(self.ngram_layers)
        tables = [numbers.index(i + 1) if i + 1 in numbers else None for i in range(self.num_layers)]
        return list(zip(types, tables, strict=True))


class Block(nn.Layer):
    """Linear or indexed attention, then experts, each of which reads the streams `B T n D` and adds to them."""

    def __init__(self, cfg: Config, kind: str, table: int | None, *, rngs: nnx.Rngs):
        self.ngrams = None if table is None else _ngrams(cfg, table, rngs=rngs)
        self.attn_streams = _streams(cfg, rngs=rngs)
        self.attn: Any = _attention(cfg, rngs=rngs) if kind == INDEXED else None
        self.delta: Any = _delta_net(cfg, rngs=rngs) if kind == LINEAR else None
        self.mlp_streams = _streams(cfg, rngs=rngs)
        self.moe = gated_shared_experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T n D"], ctx: nn.Context, cache: Any = None):
        of_ngrams, of_mixer = (None, cache) if cache is None or self.ngrams is None else cache
        if self.ngrams is not None:
            added, of_ngrams = self.ngrams(x, ctx, of_ngrams)
            x = x + added
        h, inject = self.attn_streams.read(x)
        h, of_mixer = (self.attn or self.delta)(h, ctx, of_mixer)
        x = self.attn_streams.write(x, h, inject, "attn")
        h, inject = self.mlp_streams.read(x)
        h, aux = self.moe(h, ctx)
        x = self.mlp_streams.write(x, h, inject, "mlp")
        return x, of_mixer if cache is None or self.ngrams is None else (of_ngrams, of_mixer), aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns the mixer's empty cache, after that of n-grams if there are any."""
        of_mixer = (self.attn or self.delta).init_cache(batch, capacity, dtype)
        return of_mixer if self.ngrams is None else (self.ngrams.init_cache(batch, capacity, dtype), of_mixer)


def _rotary(cfg: Config) -> Rope | ops.MRope:
    # A vision model has three positions per token (M-RoPE), a text model has one.
    return cfg.rope if cfg.vision is None else ops.MRope(cfg.rope, cfg.sections)


def _streams(cfg: Config, *, writes: bool = True, rngs: nnx.Rngs) -> nn.GatedResidual:
    return nn.GatedResidual(
        cfg.dim, streams=cfg.streams, rank=cfg.stream_rank, norm_eps=cfg.norm_eps, writes=writes, rngs=rngs
    )


def _delta_net(cfg: Config, *, rngs: nnx.Rngs) -> nn.GatedDeltaNet:
    gate = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[cfg.linear_gate]
    return delta_net(cfg, out_gate_act=gate, norm_eps=cfg.norm_eps, rngs=rngs)


def _ngrams(cfg: Config, table: int, *, rngs: nnx.Rngs) -> nn.NgramEmbedding:
    assert cfg.end_token is not None
    return nn.NgramEmbedding(
        cfg.dim,
        streams=cfg.streams,
        hash=files.ngram_hash(cfg, table),
        width=cfg.ngram_dim,
        parts=cfg.ngram_parts,
        rows_multiple=cfg.ngram_multiple,
        end=cfg.end_token,
        conv_width=cfg.ngram_conv,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def _attention(cfg: Config, *, rngs: nnx.Rngs) -> nn.BlockSparseAttention:
    # The rope rotates the first quarter of each head; the output gate has one value per head and dimension.
    return nn.BlockSparseAttention(
        cfg.dim,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        rope=_rotary(cfg),
        q_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True),
        k_norm=nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps, plus_one=True),
        out_gate_act=jax.nn.sigmoid,
        index_heads=cfg.index_heads,
        index_dim=cfg.index_dim,
        top_k=cfg.index_top,
        block=cfg.block,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


class Qwen4Exp(PatchReader, TextDecoder):
    """Qwen3.8-Flash-Next: the head reads a gated mean of the streams."""

    layers_take_tokens = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(
            cfg,
            lambda kind, rngs: Block(cfg, *kind, rngs=rngs),
            cfg.kinds,
            norm=_streams(cfg, writes=False, rngs=rngs),
            rngs=rngs,
        )
        self.tower = None if cfg.vision is None else vision.QwenVision(cfg.vision, cfg.dim, rngs=rngs)

    def enter(self, x: Float[Array, "B T D"], **inputs: Any) -> tuple[Float[Array, "B T n D"], nn.Context]:
        """Prepares the input of the first layer: as many copies of `x` as there are streams."""
        x, ctx = super().enter(x, **inputs)
        return jnp.repeat(x[:, :, None], self.cfg.streams, axis=2), ctx

    def layer_inputs(self, x: Float[Array, "B T n D"], ctx: nn.Context) -> None:
        """Returns None: single layers have no inputs of their own."""


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        *fields.ATTENTION,
        fields.rope(partial=True),
        vision.sections(SECTIONS),
        *fields.LINEAR_ATTENTION,
        files.LAYER_TYPES,
        Field("linear_gate", "output_gate_type"),
        *fields.EXPERTS,
        Field("shared_dim", "shared_expert_intermediate_size"),
        *files.STREAMS_AND_NGRAMS,
        files.END,
    ],
    model_types={"qwen4_exp_text": "Qwen4ExpForCausalLM"},
    fixed={"hidden_act": "silu", "norm_topk_prob": True, "attention_bias": False, "indexer_kv_heads": 1},
    # A number that transformers keeps for its caches, the dtype of a state, and the module that is not built.
    ignored=["number_of_conv_states", "mamba_ssm_dtype", "mtp_num_hidden_layers"],
    absent={"ngram_dim": lambda c: c.dim},
    null={"linear_gate": "silu", "ngram_layers": ()},
)
FIELDS = Multimodal(
    TEXT,
    {"vision": vision.FIELDS},
    model_types={"qwen4_exp": "Qwen4ExpForConditionalGeneration"},
    fixed={
        "vision_config.model_type": ("qwen4_exp_vision", "qwen4_exp"),  # the second as first written
        "vision_config.out_hidden_size": lambda c: c.dim,
    },
)


# fmt: off
_TEXT = Config(
    vocab=248_320, num_layers=48, dim=2560, num_heads=24, num_kv_heads=2, head_dim=256,
    rope=Rope(64, 10_000_000.0, max_length=262_144), num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128,
    expert_dim=640, shared_dim=640, num_experts=512, top_k=10, index_heads=4, index_dim=128, index_top=2048, block=4,
    ngram_layers=(2,), ngram_dim=2560, end_token=248_044,
)
PRESETS = {
    "qwen3.8-flash-next": replace(
        _TEXT,
        vision=Vision(image_token=248_056, video_token=248_057, start_token=248_053, end_token=248_054),
    ),
}
# fmt: on

FAMILY = Family("qwen4_exp", Qwen4Exp, FIELDS, files.table, PRESETS)
