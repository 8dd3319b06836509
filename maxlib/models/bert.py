"""BERT and RoBERTa (Devlin et al. 2019, arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692): encoders with learned
positions and norms after each branch, for masked tokens or classes.

RoBERTa is the same network: its positions begin behind the number of its padding token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._encoders import EncoderLM, Transform, labels
from maxlib.sharding import constrain
from maxlib.weights import (
    Computed,
    Convert,
    Copy,
    Family,
    Field,
    Fields,
    HFConfig,
    Ignore,
    Table,
    Weight,
    fields,
    names,
)

MASK = ops.Full()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a BERT; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_positions: int  # rows of the table
    num_types: int = 2  # kinds of tokens, of the first and of the second text
    first_position: int = 0  # row of the first token; RoBERTa's is one behind its padding token
    norm_eps: float = 1e-12
    labels: tuple[str, ...] | None = None  # names of classes; None for masked tokens

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim (hidden_size) must be a multiple of num_heads (num_attention_heads), got {self.dim} and "
                f"{self.num_heads}"
            )


class Block(nn.Layer):
    """Post-norm layer: each branch reads the residual stream, which is normed after adding its output."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N = cfg.dim, cfg.num_heads
        self.attn = nn.Attention(D, num_heads=N, head_dim=D // N, mask=MASK, bias=True, out_bias=True, rngs=rngs)
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=nn.vision.exact_gelu, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(x, ctx, cache)
        x = self.attn_norm(nn.residual(x, h, "attn"))
        return self.mlp_norm(nn.residual(x, self.mlp(x), "mlp")), cache, {}


class Bert(EncoderLM):
    """BERT: embeddings of tokens, positions and kinds of tokens, layers, and a head.

    The model is called as a decoder is, and takes `token_types`, `B T`, the kind of each token, by default 0. Text
    beyond its positions raises ValueError, see `nn.LearnedPositions`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.positions = nn.LearnedPositions(cfg.num_positions, cfg.dim, rngs=rngs)
        self.types = nn.LearnedPositions(cfg.num_types, cfg.dim, rngs=rngs)
        self.embed_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        if cfg.labels is None:
            self.norm = Transform(
                cfg.dim, nn.vision.exact_gelu, norm=nn.LayerNorm(cfg.dim, eps=cfg.norm_eps), rngs=rngs
            )
            self.head = None  # tied to `embed`
        else:
            self.norm = Transform(cfg.dim, jnp.tanh, rngs=rngs)
            self.head = nn.Embed(len(cfg.labels), cfg.dim, rngs=rngs)
        self.head_bias = nnx.Param(jnp.zeros(cfg.vocab if cfg.labels is None else len(cfg.labels)), axes=("vocab",))

    def embed_inputs(
        self, tokens: Int[Array, "B T"], *, token_types: Int[Array, "B T"] | None = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of tokens and of their kinds; see `nn.Decoder.embed_inputs`."""
        x, arguments = super().embed_inputs(tokens, **inputs)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        return x + self.types.rows(types, dtype=x.dtype), arguments

    def enter(self, x: Float[Array, "B T D"], *, cache: None = None, **inputs: Any):
        """Returns `x` with its positions added, normed, and the context; see `nn.Decoder.enter`."""
        x, ctx = super().enter(x, cache=cache, **inputs)
        rows = replace(ctx, positions=ctx.positions + self.cfg.first_position)
        x = self.embed_norm(x + self.positions(rows, dtype=x.dtype))
        return constrain(x, "batch", "seq", "act_embed"), ctx

    @property
    def max_length(self) -> int:
        """Number of positions that text can have."""
        return self.positions.length - self.cfg.first_position


def _read_first_position(hf: HFConfig, c: Any) -> int:
    return 0 if c.model_type == "bert" else hf.take("pad_token_id", 1) + 1


def _write_first_position(value: int, cfg: Config) -> dict[str, Any]:
    return {"pad_token_id": value - 1} if value else {}


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        *fields.ENCODER,
        Field("num_positions", "max_position_embeddings"),
        Field("num_types", "type_vocab_size"),
        Computed("first_position", _read_first_position, _write_first_position),
        Field("norm_eps", "layer_norm_eps"),
        labels(lambda cfg: f"{'Roberta' if cfg.first_position else 'Bert'}ForSequenceClassification"),
    ],
    model_types={"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM"},
    model_type=lambda cfg: "roberta" if cfg.first_position else "bert",
    fixed={"hidden_act": "gelu", "tie_word_embeddings": True},
    fixed_if_present={"position_embedding_type": "absolute", "is_decoder": False},
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters. Old files name the parts of LayerNorm gamma and beta."""
    model = "roberta" if cfg.first_position else "bert"
    layer, path = f"{model}.encoder.layer.{{i}}", "layers.{i}"
    norms = [
        (f"{model}.embeddings.LayerNorm", "embed_norm"),
        (f"{layer}.attention.output.LayerNorm", f"{path}.attn_norm"),
        (f"{layer}.output.LayerNorm", f"{path}.mlp_norm"),
    ]
    if cfg.labels is None and not cfg.first_position:
        norms.append(("cls.predictions.transform.LayerNorm", "norm.norm"))
    return [
        Weight(f"{model}.embeddings.word_embeddings.weight", "embed.w"),
        Weight(f"{model}.embeddings.position_embeddings.weight", "positions.w"),
        Weight(f"{model}.embeddings.token_type_embeddings.weight", "types.w"),
        *names.heads(f"{layer}.attention.self.query", f"{path}.attn.q"),
        *names.heads(f"{layer}.attention.self.key", f"{path}.attn.k"),
        *names.heads(f"{layer}.attention.self.value", f"{path}.attn.v"),
        *names.heads_out(f"{layer}.attention.output.dense", f"{path}.attn.o"),
        *names.linear(f"{layer}.intermediate.dense", f"{path}.mlp.up"),
        *names.linear(f"{layer}.output.dense", f"{path}.mlp.down"),
        *[entry for name, norm in norms for entry in (*names.layer_norm(name, norm), *_old_norm(name, norm))],
        *_head(cfg, model),
        Ignore(f"{model}.embeddings.position_ids"),
    ]


def _old_norm(hf_name: str, path: str) -> Sequence[Convert]:
    parts = ("gamma", "scale"), ("beta", "bias")
    return [Convert((f"{hf_name}.{old}",), f"{path}.{new}", np.asarray, dtype=None) for old, new in parts]


def _head(cfg: Config, model: str) -> Table:
    if cfg.labels is not None:
        dense, out = (
            ("classifier.dense", "classifier.out_proj")
            if cfg.first_position
            else (f"{model}.pooler.dense", "classifier")
        )
        return [
            *names.linear(dense, "norm.dense"),
            Weight(f"{out}.weight", "head.w"),
            Weight(f"{out}.bias", "head_bias"),
        ]
    if cfg.first_position:
        head = [*names.linear("lm_head.dense", "norm.dense"), *names.layer_norm("lm_head.layer_norm", "norm.norm")]
        name = "lm_head"
    else:
        head, name = names.linear("cls.predictions.transform.dense", "norm.dense"), "cls.predictions"
    return [
        *head,
        Weight(f"{name}.bias", "head_bias"),
        Copy(f"{name}.decoder.weight", of=f"{model}.embeddings.word_embeddings.weight"),
        Copy(f"{name}.decoder.bias", of=f"{name}.bias"),
        # Of pre-training's second task, and of other heads.
        Ignore("cls.seq_relationship.*"),
        Ignore(f"{model}.pooler.*"),
    ]


def _bert(num_layers: int, dim: int, *, vocab: int = 30_522) -> Config:
    return Config(vocab=vocab, num_layers=num_layers, dim=dim, mlp_dim=4 * dim, num_heads=dim // 64, num_positions=512)


# fmt: off
_ROBERTA = Config(
    vocab=50_265, num_layers=12, dim=768, mlp_dim=3072, num_heads=12, num_positions=514, num_types=1, first_position=2,
    norm_eps=1e-5,
)
# fmt: on
PRESETS = {
    "bert-base-uncased": _bert(12, 768),
    "bert-large-uncased": _bert(24, 1024),
    "bert-base-cased": _bert(12, 768, vocab=28_996),
    "roberta-base": _ROBERTA,
    "roberta-large": replace(_ROBERTA, num_layers=24, dim=1024, mlp_dim=4096, num_heads=16),
}

FAMILY = Family("bert", Bert, FIELDS, _table, PRESETS)
