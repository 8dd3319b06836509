"""Heads of numbers in place of the vocabulary: scores of tokens and texts, and embeddings of texts.

Shapes: B rows, T tokens, D width, L numbers, S texts in a row, E width of an embedding.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.arguments import check_choice
from maxlib._xla_workarounds import for_each_token
from maxlib.nn._initial_values import Init, normal
from maxlib.nn._linear import Einsum, check_ends

Pooling = Literal["first", "last", "mean"]


class ScoreHead(nnx.Module):
    """Head that gives each token L numbers: rewards, values, or logits of labels.

    It takes the place of the vocabulary's head (`with_head`), so `model.logits(hidden)` are the scores, `B T L`.

    Args:
        dim: Width D of the hidden states.
        num_labels: L; 1 for a reward model or a critic.
        bias: True adds a bias.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, num_labels: int, *, bias: bool = False, init: Init | None = None, rngs: nnx.Rngs):
        score = Einsum(
            "...D,LD->...L",
            (num_labels, dim),
            ("label", "embed"),
            bias=bias,
            init=normal(0.02) if init is None else init,
            rngs=rngs,
        )
        self.w, self.b = score.w, score.b

    @property
    def num_labels(self) -> int:
        """Number of scores per token."""
        return self.w.shape[0]

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... L"]:
        """Returns the scores in float32, whatever the dtype of `x`."""
        check_ends(x, "D", self.w.shape[1:], "the head")
        w = jnp.asarray(self.w[...], x.dtype)
        y = jnp.einsum("...D,LD->...L", x, w, preferred_element_type=jnp.float32)
        return y if self.b is None else y + for_each_token(self.b[...], y.shape)


class EmbeddingHead(nnx.Module):
    """Head that makes one vector of a text: pooling, linear layers, and a norm of 1.

        embedder = nn.with_head(model, nn.EmbeddingHead(model.cfg.dim, pooling="mean", rngs=nnx.Rngs(0)))
        vectors = embedder.head.embed(embedder(tokens).hidden)[:, 0]  # B E

    Args:
        dim: Width D of the hidden states.
        pooling: What stands for a text: its "first" token, its "last" one (Qwen3-Embedding), or the "mean".
        dense: Widths of linear layers after pooling; (3072, 768) in EmbeddingGemma.
        activation: After each of these layers; None for none.
        bias: True adds biases to them.
        normalize: True divides each vector by its length.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        dim: int,
        *,
        pooling: Pooling = "last",
        dense: Sequence[int] = (),
        activation: Callable[[Array], Array] | None = None,
        bias: bool = False,
        normalize: bool = True,
        rngs: nnx.Rngs,
    ):
        check_choice("pooling", pooling, get_args(Pooling))
        widths = [dim, *dense]
        self.dense = nnx.List(
            Einsum("...D,ED->...E", (out, width), ("label", "embed"), bias=bias, rngs=rngs)
            for width, out in itertools.pairwise(widths)
        )
        self.pooling: Pooling = pooling
        self.activation, self.normalize = activation, normalize

    def embed(
        self,
        hidden: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        texts: int = 1,
        dim: int | None = None,
    ) -> Float[Array, "B S E"]:
        """Returns the vectors of the texts in each row, in float32; zeros for a text that a row does not have.

        Args:
            hidden: The model's last hidden states.
            segment_ids: Number of each token's text, from 1; 0 is padding.
            valid: False for padding, in rows of one text.
            texts: Number S of texts in a row.
            dim: Number of leading components to keep, before the norm (Matryoshka, arXiv:2205.13147); None for all.
        """
        x = pool(hidden, self.pooling, segment_ids=segment_ids, valid=valid, texts=texts)
        exists = jnp.any(x != 0, axis=-1, keepdims=True)
        for layer in self.dense:
            x = layer(x) if self.activation is None else self.activation(layer(x))
        x = jnp.where(exists, x[..., :dim], 0)  # biases would make a vector of nothing
        return unit_vectors(x) if self.normalize else x


def unit_vectors(x: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """Divides vectors by their lengths; zeros stay zeros, with a gradient of zero."""
    squares = jnp.sum(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def pool(
    hidden: Float[Array, "B T D"],
    by: Pooling,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    texts: int = 1,
) -> Float[Array, "B S D"]:
    """Reduces the tokens of each text to one vector, in float32; zeros for a text without tokens.

    Args:
        hidden: Vectors of tokens.
        by: The text's "first" token, its "last" one, or the "mean" of all.
        segment_ids: Number of each token's text, from 1; 0 is padding.
        valid: False for padding, in rows of one text.
        texts: Number S of texts in a row.
    """
    check_choice("by", by, get_args(Pooling))
    B, T, _ = hidden.shape
    if segment_ids is None:
        segment_ids = jnp.ones((B, T), jnp.int32) if valid is None else valid.astype(jnp.int32)
    # [B, T] -> [B, S, T]
    inside = segment_ids[:, None] == jnp.arange(1, texts + 1)[None, :, None]
    index = jnp.arange(T)[None, None]
    if by == "mean":
        weights = inside / jnp.maximum(inside.sum(-1, keepdims=True), 1)
    elif by == "last":
        weights = inside & (index == jnp.max(jnp.where(inside, index, -1), axis=-1, keepdims=True))
    else:
        weights = inside & (index == jnp.min(jnp.where(inside, index, T), axis=-1, keepdims=True))
    highest = jax.lax.Precision.HIGHEST  # to select a token must not round it
    return jnp.einsum("BST,BTD->BSD", weights.astype(jnp.float32), hidden.astype(jnp.float32), precision=highest)


def is_last_token(segment_ids: Int[Array, "B T"] | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    """Returns True for the last token of each text.

    Args:
        segment_ids: Number of each token's text, from 1; 0 is padding. None for one text per row, without padding.
        shape: B and T.
    """
    if segment_ids is None:
        return jnp.broadcast_to((jnp.arange(shape[1]) == shape[1] - 1)[None], shape)
    return (segment_ids > 0) & (segment_ids != jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1))))


def with_head(model: Any, head: nnx.Module) -> Any:
    """Returns a copy of a model with another head; it shares all other arrays.

        critic = nn.with_head(model, nn.ScoreHead(model.cfg.dim, 1, rngs=nnx.Rngs(0)))
        values = critic.logits(critic(tokens).hidden)[..., 0]  # B T

    The copy trains, shards and runs in pipelines as the model does.

    Args:
        model: A `Decoder`.
        head: A `ScoreHead`, an `EmbeddingHead`, or a module of your own.
    """
    model = jax.tree.map(lambda leaf: leaf, model)
    # A cap and a bias are for logits of tokens.
    model.head, model.softcap, model.head_bias = head, None, None
    return model
