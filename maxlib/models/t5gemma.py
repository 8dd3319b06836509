"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): an encoder-decoder made of two Gemma 2.

The encoder reads `source` in both directions, also in its windows; the decoder's cross-attention has no window and no
rotary positions.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._layers import CrossPreNorm, attention
from maxlib.models._sizes import AttentionSizes, causal
from maxlib.ops import Rope
from maxlib.weights import Computed, Copy, Family, Field, Fields, HFConfig, Table, Weight, fields, names

FULL, SLIDING = "full_attention", fields.SLIDING


@dataclass(frozen=True, kw_only=True)
class Side(AttentionSizes):
    """Sizes of the encoder, or of the decoder. `Config.tied` counts for both."""

    vocab: int = 256_000
    mlp_dim: int
    layer_types: tuple[str, ...] | None = None  # None: in turn, SLIDING first
    window: int = 4096
    query_scalar: int = 256  # scores are divided by its square root
    attention_softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    attention_bias: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        return self.layer_types or _in_turn(self)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a T5Gemma; `PRESETS` has the published ones."""

    encoder: Side
    decoder: Side
    tied: bool = True

    @property
    def num_layers(self) -> int:
        """Number of layers of both sides."""
        return self.encoder.num_layers + self.decoder.num_layers


class Block(CrossPreNorm):
    """Gemma 2's layer, with norms before and after each branch; in the decoder with a third branch between the two."""

    def __init__(self, side: Side, mask: ops.Mask, source_dim: int | None = None, *, rngs: nnx.Rngs):
        self.attn_norm, self.attn_post_norm = _norm(side), _norm(side)
        self.attn = _attention(side, mask, rngs)
        if source_dim is not None:
            self.cross_norm, self.cross_post_norm = _norm(side), _norm(side)
            self.cross = _cross_attention(side, source_dim, rngs)
        self.mlp_norm, self.mlp_post_norm = _norm(side), _norm(side)
        self.mlp = nn.GatedMLP(side.dim, side.mlp_dim, act=jax.nn.gelu, rngs=rngs)


def _embed(side: Side, rngs: nnx.Rngs) -> nn.Embed:
    return nn.Embed(side.vocab, side.dim, init=nnx.initializers.normal(side.dim**-0.5), rngs=rngs)


class T5Gemma(nn.Decoder):
    """T5Gemma: `model(tokens, source=nn.Source(ids))`; both sides have an embedding of their own, scaled by sqrt(D).

    `encode(source)` computes the encoder's output once; it may be passed as `source`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        encoder, decoder = cfg.encoder, cfg.decoder
        self.cfg, self.softcap = cfg, decoder.final_softcap
        self.source_embed, self.embed = _embed(encoder, rngs), _embed(decoder, rngs)
        self.encoder = nn.Encoder(
            # Tokens attend to both sides, also in windows.
            nn.Stack(
                lambda mask, rngs: Block(encoder, mask, rngs=rngs),
                [ops.LocalWindow(encoder.window) if kind == SLIDING else ops.Full() for kind in encoder.types],
                rngs=rngs,
            ),
            _norm(encoder),
        )
        self.layers = nn.Stack(
            lambda mask, rngs: Block(decoder, mask, encoder.dim, rngs=rngs),
            [causal(decoder.window if kind == SLIDING else None) for kind in decoder.types],
            rngs=rngs,
        )
        self.norm = _norm(decoder)
        self.head = None if cfg.tied else nn.Embed(decoder.vocab, decoder.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, nn.Input]:
        """What the encoder reads, by its name in the call: `source`."""
        return {"source": nn.EncoderInput(self.encode, nn.check_source)}

    def encode(self, source: nn.Source, *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None) -> nn.Encoded:
        """Returns the encoder's output for tokens, `B S`."""
        x = _scaled(self.source_embed(jnp.asarray(source.tokens), dtype=dtype))
        ids, valid = (None if a is None else jnp.asarray(a) for a in (source.segment_ids, source.valid))
        return self.encoder(x, segment_ids=ids, valid=valid, remat=remat)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of the decoder's tokens."""
        return _scaled(self.embed(tokens, dtype=dtype))


def _in_turn(c: Any) -> tuple[str, ...]:
    return tuple(FULL if i % 2 else SLIDING for i in range(c.num_layers))


def _cross_attention(side: Side, source_dim: int, rngs: nnx.Rngs) -> nn.CrossAttention:
    return nn.CrossAttention(
        side.dim,
        num_heads=side.num_heads,
        num_kv_heads=side.num_kv_heads,
        head_dim=side.head_dim,
        source_dim=source_dim,
        bias=side.attention_bias,
        out_bias=side.attention_bias,
        scale=side.query_scalar**-0.5,
        softcap=side.attention_softcap,
        rngs=rngs,
    )


def _norm(side: Side) -> nn.RMSNorm:
    return nn.RMSNorm(side.dim, eps=side.norm_eps, plus_one=True)


def _attention(side: Side, mask: ops.Mask, rngs: nnx.Rngs) -> nn.Attention:
    return attention(
        side,
        mask=mask,
        rope=side.rope,
        bias=side.attention_bias,
        out_bias=side.attention_bias,
        scale=side.query_scalar**-0.5,
        softcap=side.attention_softcap,
        rngs=rngs,
    )


def _scaled(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x * jnp.asarray(x.shape[2] ** 0.5, x.dtype)


SIDE = Fields(
    Side,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("dim", "hidden_size"),
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(default_length=8192),
        fields.WINDOW,
        fields.layer_types(SLIDING, FULL, usual=_in_turn),
        Field("query_scalar", "query_pre_attn_scalar"),
        Field("attention_softcap", "attn_logit_softcapping"),
        Field("final_softcap", "final_logit_softcapping"),
        Field("norm_eps", "rms_norm_eps"),
        fields.ATTENTION_BIAS,
    ],
    fixed={"model_type": "t5_gemma_module", "hidden_activation": "gelu_pytorch_tanh"},
    # Of training, and what follows from the other side.
    ignored=("dropout_rate", "cross_attention_hidden_size", "tie_word_embeddings"),
)


def _side(name: str) -> Computed:
    def read(hf: HFConfig, c: Any) -> Side:
        return SIDE.read(hf.nested(name))

    def write(value: Side, cfg: Config) -> dict[str, Any]:
        return {name: SIDE.write(value)}

    return Computed(name, read, write)


FIELDS = Fields(
    Config,
    [
        _side("encoder"),
        _side("decoder"),
        Field("tied", "tie_word_embeddings"),
    ],
    model_types={"t5gemma": "T5GemmaForConditionalGeneration"},
    fixed={"is_encoder_decoder": True, "vocab_size": lambda c: c.decoder.vocab},
    ignored=("dropout_rate", "classifier_dropout_rate"),
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters."""
    norms = [
        Weight(f"{when}_{hf_name}_layernorm.weight", f"{branch}_{norm}.scale")
        for hf_name, branch in (("self_attn", "attn"), ("cross_attn", "cross"), ("feedforward", "mlp"))
        for when, norm in (("pre", "norm"), ("post", "post_norm"))
    ]
    layer = [*norms, *names.ATTENTION, *names.MLP]
    cross = [
        *[entry for part in "qkv" for entry in names.heads(f"cross_attn.{part}_proj", f"cross.{part}")],
        *names.heads_out("cross_attn.o_proj", "cross.o"),
    ]
    encoder, decoder = "model.encoder", "model.decoder"
    return [
        Weight(f"{encoder}.embed_tokens.weight", "source_embed.w"),
        *names.under(layer, f"{encoder}.layers.{{i}}", "encoder.layers.{i}"),
        Weight(f"{encoder}.norm.weight", "encoder.norm.scale"),
        Weight(f"{decoder}.embed_tokens.weight", "embed.w"),
        *names.under([*layer, *cross], f"{decoder}.layers.{{i}}", "layers.{i}"),
        Weight(f"{decoder}.norm.weight", "norm.scale"),
        Weight("lm_head.out_proj.weight", "head.w"),
        Copy("lm_head.out_proj.weight", of=f"{decoder}.embed_tokens.weight"),
    ]


_ROPE = Rope(256, 10_000.0, max_length=8192)
_2B = Side(num_layers=26, dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4, head_dim=256, rope=_ROPE)
_9B = replace(_2B, num_layers=42, dim=3584, mlp_dim=14_336, num_heads=16, num_kv_heads=8)

PRESETS = {
    "t5gemma-2b-2b": Config(encoder=_2B, decoder=_2B),
    "t5gemma-9b-2b": Config(encoder=_9B, decoder=_2B),
    "t5gemma-9b-9b": Config(encoder=_9B, decoder=_9B),
}

FAMILY = Family("t5gemma", T5Gemma, FIELDS, _table, PRESETS)
