"""Encoders, and their output as an input of a decoder.

Shapes: B rows, T tokens of the decoder, S tokens of the encoder, D width.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree
from maxlib.nn.decoder._context import Encoded, PositionBias, make_context
from maxlib.nn.decoder._decoder import attributes_of, check_tokens
from maxlib.nn.decoder._model import InputCall
from maxlib.nn.remat import Policy
from maxlib.nn.stack import Stack
from maxlib.sharding import constrain


@pytree
class Source:
    """Tokens that an encoder reads, for each row of the decoder's tokens.

    Args:
        tokens: Ids, `B S`.
        segment_ids: `B S`, the packed document of each token, in increasing order, 0 for padding. Documents have the
            same numbers as on the decoder's side.
        valid: `B S`, False for padding on either side.
    """

    tokens: Int[Array | np.ndarray, "B S"]
    segment_ids: Int[Array | np.ndarray, "..."] | None = None
    valid: Bool[Array | np.ndarray, "..."] | None = None


class Encoder(nnx.Module):
    """Layers that read a whole sequence in both directions, and a norm; its output is for `CrossAttention`.

    Layers are those of any stack; attention in both directions has `mask=ops.Full()`.

    Args:
        layers: The stack.
        norm: Norm after the last layer.
        position_bias: What is added to the scores of all layers, such as `nn.RelativeBias`; None for nothing.
    """

    def __init__(self, layers: Stack, norm: nnx.Module, *, position_bias: PositionBias | None = None):
        self.layers, self.norm, self.position_bias = layers, norm, position_bias

    def __call__(
        self,
        x: Float[Array, "B S D"],
        *,
        segment_ids: Int[Array, "B S"] | None = None,
        valid: Bool[Array, "B S"] | None = None,
        remat: Policy = None,
    ) -> Encoded:
        """Encodes vectors of tokens, `B S D`.

        Args:
            x: The vectors.
            segment_ids: Packed document of each vector, 0 for padding; None for one document per row.
            valid: False for padding; None if every vector is real.
            remat: What layers keep for the backward pass, see `nn.remat`.
        """
        ctx = make_context(
            *x.shape[:2],
            segment_ids=segment_ids,
            valid=valid,
            position_bias=self.position_bias,
            masks=attributes_of(self.layers, "mask"),
            ropes=attributes_of(self.layers, "rope"),
        )
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat, pipelined=False)
        ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None and valid is not None else segment_ids
        return Encoded(self.norm(x), ids if ids is None or valid is None else jnp.where(valid, ids, 0))


@dataclasses.dataclass(frozen=True)
class EncoderInput:
    """What a decoder's encoder reads, as an input of the decoder's call (`nn.Decoder.inputs`).

    A call with a cache that has the encoder's keys and values needs no such input.

    Args:
        encode: Encoder, `encode(value, dtype=, remat=) -> Encoded`.
        check_value: Raises ValueError for a value that does not fit the tokens, `check_value(tokens, value)`.
    """

    encode: Callable[..., Encoded]
    check_value: Callable[[Int[Any, "B T"], Any], None]
    moves_positions: bool = dataclasses.field(default=False, init=False)

    def is_placeholder(self, tokens: Int[Any, "B T"]) -> Bool[Any, "B T"]:
        """Returns False for all tokens: the encoder's output does not take their places."""
        return tokens != tokens

    def check(self, tokens: Int[Any, "B T"], value: Any) -> None:
        """Raises ValueError if a value does not fit the tokens; None fits, because caches may have what it encodes."""
        if value is not None and not isinstance(value, Encoded):
            self.check_value(tokens, value)

    def embed(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], value: Any, call: InputCall
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns `x` as it is, and the encoder's output for the context; an `Encoded` value is passed on."""
        encoded = value if isinstance(value, Encoded) else self.encode(value, dtype=call.dtype, remat=call.remat)
        return x, {"encoded": encoded}


def check_source(tokens: Int[Any, "B T"], source: Any) -> None:
    """Raises ValueError or TypeError unless a `Source` fits the decoder's tokens; inside jit, only for wrong shapes."""
    if not isinstance(source, Source):
        raise TypeError(f"source must be an nn.Source of tokens `B S`, or an nn.Encoded, got {type(source).__name__}")
    check_tokens(source.tokens)
    shape = np.shape(source.tokens)
    if shape[0] != len(tokens):
        raise ValueError(f"source must have a row for each of the {len(tokens)} rows of tokens, got {shape[0]}")
    for name in ("segment_ids", "valid"):
        value = getattr(source, name)
        if value is not None and np.shape(value) != shape:
            raise ValueError(f"source.{name} must have the shape of source.tokens, {shape}, got {np.shape(value)}")
    with contextlib.suppress(jax.errors.TracerArrayConversionError):
        ids = None if source.segment_ids is None else np.asarray(source.segment_ids)
        if ids is not None and any((np.diff(row[row > 0]) < 0).any() for row in ids):
            raise ValueError(
                "source.segment_ids must increase along a row, with 0 for padding: number documents in order"
            )
