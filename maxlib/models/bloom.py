"""BLOOM (BigScience 2022, arXiv:2211.05100): no positions but ALiBi's, a norm of the embedding, biases everywhere."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder
from maxlib.models._sizes import Sizes
from maxlib.weights import Family, Field, Fields, Renamed, Table, names


@dataclass(frozen=True, kw_only=True)
class Config(Sizes):
    """Sizes of a BLOOM; `PRESETS` has the published ones."""

    norm_eps: float = 1e-5
    tied: bool = True


class Block(PreNorm):
    """GPT-2's layer."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N = cfg.dim, cfg.num_heads
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, num_heads=N, head_dim=D // N, bias=True, out_bias=True, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.MLP(D, 4 * D, rngs=rngs)  # gelu by tanh


class Bloom(TextDecoder):
    """BLOOM: 46 languages; scores fall linearly with the distance of query and key."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)
        self.embed_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.position_bias = nn.ALiBi(cfg.num_heads)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the normed vectors of `tokens`."""
        return self.embed_norm(super().embed_tokens(tokens, dtype))


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "n_layer"),
        Field("dim", "hidden_size"),
        Field("num_heads", "n_head"),
        Field("norm_eps", "layer_norm_epsilon"),
        Field("tied", "tie_word_embeddings"),
    ],
    model_types={"bloom": "BloomForCausalLM"},
    fixed={"apply_residual_connection_post_layernorm": False},
    ignored=(
        "offset_alibi",
        "seq_length",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "unk_token_id",
        "n_inner",
    ),  # of early ones
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.LAYER_NORMS,
        *names.qkv("self_attention.query_key_value", "attn", "(N three H)"),  # each head's are neighbours
        *names.heads_out("self_attention.dense", "attn.o"),
        *names.linear("mlp.dense_h_to_4h", "mlp.up"),
        *names.linear("mlp.dense_4h_to_h", "mlp.down"),
    ]
    return [
        *names.decoder_table(layer, model="transformer", embed="word_embeddings", layers="h", norm="ln_f"),
        *names.layer_norm("transformer.word_embeddings_layernorm", "embed_norm"),
        # Releases leave out the prefix.
        *[Renamed(name, f"transformer.{name}") for name in ("word_embeddings", "h.", "ln_f.")],
    ]


_560M = Config(vocab=250_880, num_layers=24, dim=1024, num_heads=16)
PRESETS = {
    "bloom-560m": _560M,
    "bloom-1b1": replace(_560M, dim=1536),
    "bloom-1b7": replace(_560M, dim=2048),
    "bloom-3b": replace(_560M, num_layers=30, dim=2560, num_heads=32),
    "bloom-7b1": replace(_560M, num_layers=30, dim=4096, num_heads=32),
    "bloom-176b": replace(_560M, num_layers=70, dim=14_336, num_heads=112),
}

FAMILY = Family("bloom", Bloom, FIELDS, _table, PRESETS)
