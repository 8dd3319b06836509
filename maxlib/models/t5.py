"""T5, T5 v1.1 and Flan-T5 (Raffel et al. 2020, arXiv:1910.10683): an encoder-decoder whose positions are learned biases
of the scores.

The encoder reads `source`, the decoder generates from a first token 0. T5 v1.1 has a gated MLP and a head of its own.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import CrossPreNorm, PreNorm
from maxlib.weights import Computed, Copy, Family, Field, Fields, HFConfig, Ignore, Table, Weight, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a T5; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int  # of the decoder
    num_encoder_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    num_buckets: int = 32  # of distances
    max_distance: int = 128
    gated: bool = False  # T5 v1.1: GeGLU instead of ReLU
    norm_eps: float = 1e-6
    tied: bool = True  # the head is the embedding, and its input is scaled by dim^-0.5


def _attention(cfg: Config, mask: ops.Mask, rngs: nnx.Rngs) -> nn.Attention:
    # Scores are not scaled: the initial values of queries are smaller instead.
    return nn.Attention(cfg.dim, num_heads=cfg.num_heads, head_dim=cfg.head_dim, mask=mask, scale=1.0, rngs=rngs)


def _mlp(cfg: Config, rngs: nnx.Rngs) -> nn.GatedMLP | nn.MLP:
    if cfg.gated:
        return nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
    return nn.MLP(cfg.dim, cfg.mlp_dim, act=jax.nn.relu, bias=False, rngs=rngs)


class EncoderBlock(PreNorm):
    """Pre-norm layer in which every token attends to every other."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, ops.Full(), rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = _mlp(cfg, rngs)


class DecoderBlock(CrossPreNorm):
    """Pre-norm layer of causal attention, attention to the encoder's output, and the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N, H = cfg.dim, cfg.num_heads, cfg.head_dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = _attention(cfg, ops.Causal(), rngs)
        self.cross_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.cross = nn.CrossAttention(D, num_heads=N, head_dim=H, scale=1.0, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = _mlp(cfg, rngs)


class T5(nn.Decoder):
    """T5: `model(tokens, source=nn.Source(ids))` reads `ids` and predicts what follows `tokens`.

    `encode(source)` computes the encoder's output once; it may be passed as `source`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)  # of both sides
        self.encoder = nn.Encoder(
            nn.Stack(lambda _, rngs: EncoderBlock(cfg, rngs=rngs), cfg.num_encoder_layers, rngs=rngs),
            nn.RMSNorm(cfg.dim, eps=cfg.norm_eps),
            position_bias=self._bias(bidirectional=True, rngs=rngs),
        )
        self.layers = nn.Stack(lambda _, rngs: DecoderBlock(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.position_bias = self._bias(bidirectional=False, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def _bias(self, *, bidirectional: bool, rngs: nnx.Rngs) -> nn.RelativeBias:
        cfg = self.cfg
        return nn.RelativeBias(
            cfg.num_heads,
            num_buckets=cfg.num_buckets,
            max_distance=cfg.max_distance,
            bidirectional=bidirectional,
            rngs=rngs,
        )

    @property
    def inputs(self) -> dict[str, nn.Input]:
        """What the encoder reads, by its name in the call: `source`."""
        return {"source": nn.EncoderInput(self.encode, nn.check_source)}

    def encode(self, source: nn.Source, *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None) -> nn.Encoded:
        """Returns the encoder's output for tokens, `B S`."""
        x = self.embed(jnp.asarray(source.tokens), dtype=dtype)
        ids, valid = (None if a is None else jnp.asarray(a) for a in (source.segment_ids, source.valid))
        return self.encoder(x, segment_ids=ids, valid=valid, remat=remat)

    def leave(self, x: Float[Array, "B T D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head; scaled if the head is the embedding."""
        hidden = super().leave(x, ctx)
        return hidden * self.cfg.dim**-0.5 if self.cfg.tied else hidden


def _read_tied(hf: HFConfig, c: Any) -> bool:
    # transformers 5 writes true for all T5, and whether the head is the embedding as `scale_decoder_outputs`.
    return hf.take("scale_decoder_outputs", hf.take("tie_word_embeddings", True))


def _read_gated(hf: HFConfig, c: Any) -> bool:
    gated = hf.require("feed_forward_proj", "relu", "gated-gelu") == "gated-gelu"
    hf.require("is_gated_act", gated)
    hf.require("dense_act_fn", "gelu_new" if gated else "relu")
    return gated


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_encoder_layers", "num_layers"),
        Field("num_layers", "num_decoder_layers"),
        Field("dim", "d_model"),
        Field("mlp_dim", "d_ff"),
        Field("num_heads"),
        Field("head_dim", "d_kv"),
        Field("num_buckets", "relative_attention_num_buckets"),
        Field("max_distance", "relative_attention_max_distance"),
        Computed("gated", _read_gated, lambda value, cfg: {"feed_forward_proj": "gated-gelu" if value else "relu"}),
        Field("norm_eps", "layer_norm_epsilon"),
        Computed("tied", _read_tied, lambda value, cfg: {"tie_word_embeddings": value}),
    ],
    model_types={"t5": "T5ForConditionalGeneration"},
    fixed={"is_encoder_decoder": True, "decoder_start_token_id": 0},
    ignored=("n_positions",),
    absent={"num_layers": lambda c: c.num_encoder_layers},
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters."""
    table: list[Any] = [Weight("shared.weight", "embed.w")]
    for side, path, mlp in (("encoder", "encoder.layers", 1), ("decoder", "layers", 2)):
        block, layer = f"{side}.block.{{i}}.layer", f"{path}.{{i}}"
        dense = f"{block}.{mlp}.DenseReluDense"
        table += [
            *names.attention(f"{block}.0.SelfAttention.{{}}", f"{layer}.attn", out=f"{block}.0.SelfAttention.o"),
            Weight(f"{block}.0.layer_norm.weight", f"{layer}.attn_norm.scale"),
            Weight(f"{dense}.{'wi_0' if cfg.gated else 'wi'}.weight", f"{layer}.mlp.{'gate' if cfg.gated else 'up'}.w"),
            *([Weight(f"{dense}.wi_1.weight", f"{layer}.mlp.up.w")] if cfg.gated else []),
            Weight(f"{dense}.wo.weight", f"{layer}.mlp.down.w"),
            Weight(f"{block}.{mlp}.layer_norm.weight", f"{layer}.mlp_norm.scale"),
            Copy(f"{side}.embed_tokens.weight", of="shared.weight"),
        ]
    cross, bias = "decoder.block.{i}.layer.1", "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *table,
        *names.attention(f"{cross}.EncDecAttention.{{}}", "layers.{i}.cross", out=f"{cross}.EncDecAttention.o"),
        Weight(f"{cross}.layer_norm.weight", "layers.{i}.cross_norm.scale"),
        Weight(f"encoder.{bias}", "encoder.position_bias.w"),
        Weight(f"decoder.{bias}", "position_bias.w"),
        Weight("encoder.final_layer_norm.weight", "encoder.norm.scale"),
        Weight("decoder.final_layer_norm.weight", "norm.scale"),
        Weight("lm_head.weight", "head.w"),
        Copy("lm_head.weight", of="shared.weight"),
        Ignore(f"{cross}.EncDecAttention.relative_attention_bias.weight"),  # of early files, read by none
    ]


def _t5(num_layers: int, dim: int, mlp_dim: int, num_heads: int, *, head_dim: int = 64) -> Config:
    return Config(
        vocab=32_128,
        num_layers=num_layers,
        num_encoder_layers=num_layers,
        dim=dim,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        head_dim=head_dim,
    )


_V1_1 = {"gated": True, "tied": False}
PRESETS = {
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "t5-3b": _t5(24, 1024, 16_384, 32, head_dim=128),
    "t5-11b": _t5(24, 1024, 65_536, 128, head_dim=128),
    "flan-t5-small": replace(_t5(8, 512, 1024, 6), **_V1_1),
    "flan-t5-base": replace(_t5(12, 768, 2048, 12), **_V1_1),
    "flan-t5-large": replace(_t5(24, 1024, 2816, 16), **_V1_1),
    "flan-t5-xl": replace(_t5(24, 2048, 5120, 32), **_V1_1),
    "flan-t5-xxl": replace(_t5(24, 4096, 10_240, 64), **_V1_1),
}

FAMILY = Family("t5", T5, FIELDS, _table, PRESETS)
