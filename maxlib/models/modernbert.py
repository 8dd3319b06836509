"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder with rotary positions, GeGLU and, in two of three
layers, windows of 64 tokens to both sides.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._encoders import EncoderLM, Transform, labels
from maxlib.models._layers import PreNorm
from maxlib.ops import Rope
from maxlib.weights import Computed, Copy, Family, Field, Fields, HFConfig, Table, Weight, fields, names

FULL, LOCAL = "full_attention", fields.SLIDING


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a ModernBERT; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    rope: Rope
    local_rope: Rope
    window: int = 128  # both sides together
    layer_types: tuple[str, ...] | None = None  # None: every third layer is global
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = True
    transform_bias: bool = False
    tied: bool = True
    labels: tuple[str, ...] | None = None  # names of classes; None for masked tokens
    pooling: str = "cls"  # of classes: the first token, or the "mean" of all

    @property
    def kinds(self) -> list[tuple[bool, str]]:
        """Whether a layer is the first one, which has no norm before attention, and its type."""
        types = _usual_types(self) if self.layer_types is None else self.layer_types
        return [(i == 0, kind) for i, kind in enumerate(types)]


def _usual_types(c: Any, every: int = 3) -> tuple[str, ...]:
    return tuple(LOCAL if i % every else FULL for i in range(c.num_layers))


class Block(PreNorm):
    """Pre-norm layer of attention, in a window or not, and a gated MLP."""

    def __init__(self, cfg: Config, kind: tuple[bool, str], *, rngs: nnx.Rngs):
        is_first, layer_type = kind
        D, is_local = cfg.dim, layer_type == LOCAL
        self.attn_norm = None if is_first else _norm(cfg)
        self.attn = nn.Attention(
            D,
            num_heads=cfg.num_heads,
            head_dim=cfg.head_dim,
            mask=ops.LocalWindow(cfg.window // 2) if is_local else ops.Full(),
            rope=cfg.local_rope if is_local else cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            rngs=rngs,
        )
        self.mlp_norm = _norm(cfg)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=nn.vision.exact_gelu, bias=cfg.mlp_bias, rngs=rngs)


def _norm(cfg: Config) -> nn.LayerNorm:
    return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=cfg.norm_bias)


class ModernBert(EncoderLM):
    """ModernBERT: normed token vectors, layers, and a head."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.embed_norm = _norm(cfg)
        self.layers = nn.Stack(lambda kind, rngs: Block(cfg, kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.final_norm = _norm(cfg)
        self.norm = Transform(cfg.dim, nn.vision.exact_gelu, norm=_norm(cfg), bias=cfg.transform_bias, rngs=rngs)
        count = cfg.vocab if cfg.labels is None else len(cfg.labels)
        is_tied = cfg.labels is None and cfg.tied
        self.head = None if is_tied else nn.Embed(count, cfg.dim, rngs=rngs)
        has_bias = cfg.labels is not None or cfg.head_bias
        self.head_bias = nnx.Param(jnp.zeros(count), axes=("vocab",)) if has_bias else None

    def enter(self, x: Float[Array, "B T D"], **inputs: Any):
        """Returns normed vectors, and the context; see `nn.Decoder.enter`."""
        return super().enter(self.embed_norm(x), **inputs)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T C"]:
        """Returns the input of the head; with mean pooling that of a document's mean, at each of its tokens."""
        x = self.final_norm(x)
        if self.cfg.labels is not None and self.cfg.pooling == "mean":
            real = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
            # In bfloat16 neither sums nor counts would grow beyond a few hundred tokens.
            wide = jnp.promote_types(x.dtype, jnp.float32)
            x = jax.vmap(_mean_of_document)(x.astype(wide), real.astype(wide), ctx.start).astype(x.dtype)
        return super().leave(x, ctx)


def _mean_of_document(x: Float[Array, "T D"], real: Float[Array, " T"], start: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Returns for each token the mean of the real tokens with the same `start`."""
    sums = jnp.zeros_like(x).at[start].add(x * real[:, None])
    counts = jnp.zeros_like(real).at[start].add(real)
    return (sums / jnp.maximum(counts, 1)[:, None])[start]


def _absent_types(hf: HFConfig, c: Any) -> tuple[str, ...]:
    return _usual_types(c, hf.take("global_attn_every_n_layers", 3))


def _rope_field(name: str, layer_type: str, theta_field: str, theta: float) -> Computed:
    stored = fields.rope(
        name,
        layer_type=layer_type,
        theta_field=theta_field,
        scaling_field=None,
        default_theta=theta,
        default_length=8192,
    )

    def write(value: Rope, cfg: Config) -> dict[str, Any]:
        return {**stored.write(value, cfg), "max_position_embeddings": value.max_length}

    return Computed(name, stored.read, write)


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        *fields.ENCODER,
        fields.EQUAL_HEADS,
        _rope_field("rope", FULL, "global_rope_theta", 160_000.0),
        _rope_field("local_rope", LOCAL, "local_rope_theta", 10_000.0),
        Field("window", "local_attention"),
        fields.layer_types(LOCAL, FULL, usual=_usual_types, absent=_absent_types),
        Field("norm_eps"),
        Field("norm_bias"),
        fields.ATTENTION_BIAS,
        Field("mlp_bias"),
        Field("head_bias", "decoder_bias"),
        Field("transform_bias", "classifier_bias"),
        Field("tied", "tie_word_embeddings"),
        labels("ModernBertForSequenceClassification"),
        Field("pooling", "classifier_pooling"),
    ],
    model_types={"modernbert": "ModernBertForMaskedLM"},
    fixed={"hidden_activation": "gelu", "classifier_activation": "gelu"},
    # Of training, and others that say nothing here.
    ignored=(
        *("sparse_prediction", "sparse_pred_ignore_index", "embedding_size", "sliding_window"),
        *("global_attn_every_n_layers", "position_embedding_type", "layer_norm_eps"),
    ),
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters."""
    layer, path, embed = "model.layers.{i}", "layers.{i}", "model.embeddings.tok_embeddings.weight"
    head = "decoder" if cfg.labels is None else "classifier"
    return [
        Weight(embed, "embed.w"),
        *names.layer_norm("model.embeddings.norm", "embed_norm"),
        *names.layer_norm(f"{layer}.attn_norm", f"{path}.attn_norm"),
        *names.qkv(f"{layer}.attn.Wqkv", f"{path}.attn"),
        *names.heads_out(f"{layer}.attn.Wo", f"{path}.attn.o"),
        *names.layer_norm(f"{layer}.mlp_norm", f"{path}.mlp_norm"),
        *names.gate_up(f"{layer}.mlp.Wi", f"{path}.mlp"),
        *names.linear(f"{layer}.mlp.Wo", f"{path}.mlp.down"),
        *names.layer_norm("model.final_norm", "final_norm"),
        *names.linear("head.dense", "norm.dense"),
        *names.layer_norm("head.norm", "norm.norm"),
        Weight(f"{head}.weight", "head.w"),
        Weight(f"{head}.bias", "head_bias"),
        Copy("decoder.weight", of=embed),
    ]


# fmt: off
_BASE = Config(
    vocab=50_368, num_layers=22, dim=768, mlp_dim=1152, num_heads=12, head_dim=64,
    rope=Rope(64, 160_000.0, max_length=8192), local_rope=Rope(64, 10_000.0, max_length=8192), pooling="mean",
)
# fmt: on
PRESETS = {
    "modernbert-base": _BASE,
    "modernbert-large": replace(_BASE, num_layers=28, dim=1024, mlp_dim=2624, num_heads=16),
}

FAMILY = Family("modernbert", ModernBert, FIELDS, _table, PRESETS)
