"""Base class of decoder-only models: embedding, stack of layers, final norm, head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Real

from maxlib._utils.arguments import check_array, check_dtype
from maxlib._xla_workarounds import for_each_token
from maxlib.nn._linear import Embed
from maxlib.nn.cache import Cache
from maxlib.nn.decoder._context import (
    AnyRope,
    Context,
    PositionBias,
    make_context,
    zigzag_shard,
    zigzag_unshard,
)
from maxlib.nn.decoder._model import Input, InputCall, Output
from maxlib.nn.mtp import MTP, MTPOutput, predict_ahead
from maxlib.nn.remat import Policy
from maxlib.nn.stack import Carry, Stack
from maxlib.ops import Mask
from maxlib.sharding import constrain


def check_tokens(tokens: Any) -> None:
    """Raises TypeError for what is no array, and ValueError for one that is not of integers, `B T`."""
    if isinstance(tokens, str):
        raise TypeError("tokens must be an array of integers, rows of ids `B T`, got text: encode it with a tokenizer")
    check_array(tokens, "tokens")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be an array of integers, rows of ids `B T`, got {tokens.dtype} of shape {tokens.shape}. A "
            "single row is jnp.asarray(ids)[None]; text has to be encoded."
        )


def attributes_of(layers: nnx.Module, name: str) -> tuple[Any, ...]:
    """Returns the values of an attribute of mixers and of parts of them, each once."""
    values = (getattr(module, name, None) for _, module in nnx.iter_modules(layers))
    return tuple(dict.fromkeys(value for value in values if value is not None))


class Decoder(nnx.Module):
    """Base class of decoder-only models: embedding, stack of layers, final norm and head (docs/decisions.md).

    A model family subclasses it and sets the attributes in its constructor; it may override `inputs`, `embed_tokens`,
    `enter`, `layer_inputs` and `leave`. A model with another structure need not subclass it: trainers and generators
    only need the methods of `nn.Model`.

    Attributes:
        cfg: The model's config.
        embed: Table of token vectors.
        layers: The stack of layers.
        norm: The norm after the last layer.
        head: Table of output vectors, None if it is tied to `embed`; or a head of numbers (`nn.with_head`).
        head_bias: `V`, added to the logits; None for none. With it `hidden` ends with a one, and the bias is the last
            column of `head_weight()`, so losses compute as without one.
        mtp: Modules for multi-token prediction, which predict 2, 3, ... tokens ahead; the first one can draft.
        recompute_cache_at: Length at which the rotation of cached keys changes, so that they must be recomputed
            (LongRoPE in Phi); None if there is none.
        softcap: `c` in `c * tanh(logits / c)`; None leaves logits as they are.
        has_cache: False for an encoder, which cannot decode token by token.
        layers_take_tokens: True if layers read ids from `ctx.tokens`.
        layers_share: True if layers share values with later ones. Their `x` is then a `stack.Carry`.
        position_bias: What is added to the scores of self-attention in all layers, such as `nn.ALiBi`.
    """

    cfg: Any
    embed: Embed
    layers: Stack
    norm: nnx.Module
    head: Any = None
    head_bias: nnx.Param | None = None
    mtp: Sequence[MTP] = ()
    recompute_cache_at: int | None = None
    softcap: float | None = None
    has_cache: bool = True
    layers_take_tokens: bool = False
    layers_share: bool = False
    position_bias: PositionBias | None = None

    @property
    def inputs(self) -> dict[str, Input]:
        """Returns what the model reads besides tokens, by the name of its argument, such as `images`."""
        return {}

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Returns the masks of the layers, whose key intervals are computed once per forward pass."""
        return attributes_of(self.layers, "mask")

    @property
    def ropes(self) -> tuple[AnyRope, ...]:
        """Returns the rotary embeddings of the layers, whose tables are computed once per forward pass."""
        return attributes_of(self.layers, "rope")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Real[Array, "B T *R"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: Cache | None = None,
        dtype: Any = jnp.bfloat16,
        remat: Policy = None,
        **inputs: Any,
    ) -> Output:
        """Computes the hidden states of rows of tokens.

        Args:
            tokens: Ids, `B T`, with placeholders for images and sound.
            positions: Positions for rotary tables, by default each token's index in its document; `B T 3` by time, row
                and column for a model with M-RoPE, which computes them from tokens and images.
            segment_ids: Packed document of each token, 0 for padding; None for one document per row.
            valid: False for padding; None if every token is real.
            cache: Cache of earlier tokens, or None. All placeholders of an image or clip must be in one call.
            dtype: Dtype of the computation.
            remat: What layers keep for the backward pass, see `nn.remat`.
            **inputs: What the model reads besides tokens (`inputs`), in the order of their placeholders: `images` as
                `nn.vision.Patches`, or `pixel_values` if all are of one size; `audio` as `nn.audio.Clips`.

        Returns:
            The hidden states after the final norm, the new cache, and the layers' losses and metrics.

        Raises:
            TypeError: when `tokens` or another input is a list or another library's array, or `dtype` no dtype.
            ValueError: when `tokens` is not an integer array of shape `B T`, and as `check_inputs` does; inside jit,
                where ids are hidden, placeholders that do not fit become NaN instead.
        """
        x, arguments = self.embed_inputs(
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            cache=cache,
            dtype=dtype,
            remat=remat,
            **inputs,
        )
        return self.run(x, **arguments, cache=cache, remat=remat)

    def check_inputs(self, tokens: Int[Any, "B T"], **inputs: Any) -> None:
        """Raises ValueError for an input that the model does not read, or that does not fit its placeholders.

        `__call__` does this too; call it before a jitted function of your own, in which ids are hidden.

        Args:
            tokens: Ids, with placeholders for the inputs.
            **inputs: Inputs by name, such as `images`; None for none.
        """
        readers = self.inputs
        if unread := [name for name, value in inputs.items() if value is not None and name not in readers]:
            raise ValueError(
                f"this {type(self).__name__} reads {' and '.join(['text', *readers])} only: call it without {unread[0]}"
            )
        for name, reader in readers.items():
            reader.check(tokens, inputs.get(name))

    def embed_inputs(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Real[Array, "B T *R"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: Cache | None = None,
        dtype: Any,
        remat: Policy = None,
        **inputs: Any,
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of what a model reads, and the arguments of `enter`; it takes those of `__call__`.

        Raises:
            TypeError, ValueError: as `__call__` does.
        """
        check_tokens(tokens)
        check_dtype(dtype)
        rows = {"positions": positions, "segment_ids": segment_ids, "valid": valid}
        for name, value in rows.items():
            if value is not None:
                check_array(value, name)
        x = self.embed_tokens(tokens, dtype)
        self.check_inputs(tokens, **inputs)
        arguments = rows | self.ids_for_layers(tokens)
        call = InputCall(positions, segment_ids, valid, cache, dtype, remat)
        for name, reader in self.inputs.items():
            if (value := inputs.get(name)) is not None:
                x, changes = reader.embed(x, tokens, value, call)
                arguments |= changes
            elif cache is None:
                # Inside jit no error can be raised: NaN, so that a loss does not learn from them.
                x = jnp.where(reader.is_placeholder(tokens)[:, :, None], jnp.nan, x)
        return x, arguments

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the vectors of token ids, `B T D`, in `dtype`."""
        return self.embed(tokens, dtype=dtype)

    def ids_for_layers(self, tokens: Int[Array, "B T"]) -> dict[str, Array]:
        """Returns the ids as a keyword argument of `enter` if layers use them, else nothing."""
        return {"tokens": tokens} if self.layers_take_tokens else {}

    def run(self, x: Float[Array, "B T D"], *, cache: Cache | None, remat: Policy, **inputs: Any) -> Output:
        """Computes the output from token vectors; `inputs` are arguments of `nn.make_context`."""
        # [B, T, D] in, [B, T, D] out; `aux` has a leading axis of layers.
        x, ctx = self.enter(x, cache=cache, **inputs)
        inputs = self.layer_inputs(x.x if isinstance(x, Carry) else x, ctx)
        ctx = dataclasses.replace(ctx, features=None)  # layers get theirs as inputs
        x, layers, aux = self.layers(x, ctx, cache and cache.layers, remat=remat, layer_inputs=inputs)
        # `cache and ...`: None without a cache.
        return Output(self.leave(x, ctx), cache and cache.advanced(layers, ctx), aux)

    def enter(self, x: Float[Array, "B T D"], *, cache: Cache | None = None, **inputs: Any) -> tuple[Any, Context]:
        """Prepares the input of the first layer: shards `x` over the mesh and puts tokens of the context in order.

        If sequences are split over devices, tokens are put into zigzag order, unless a layer needs their natural order.
        """
        ctx = make_context(
            *x.shape[:2],
            cache=cache,
            position_bias=self.position_bias,
            masks=self.masks,
            ropes=self.ropes,
            **inputs,
        )
        # Shard [B, T, D] over the mesh as every layer expects it.
        x = checkpoint_name(constrain(x, "batch", "seq", "act_embed"), "embed")
        # A cache stores tokens by index, so decoding keeps the natural order; a position bias is in that order too.
        in_order = cache is not None or self.position_bias is not None
        x, ctx = zigzag_shard(x, ctx) if self.layers.is_reorderable and not in_order else (x, ctx)
        return (Carry(x, {}) if self.layers_share else x), ctx

    def layer_inputs(self, x: Float[Array, "B T D"], ctx: Context) -> Any:
        """Returns per-layer inputs, arrays with a leading axis of layers; None if there are none.

        By default they are `ctx.features`, which images add to their tokens after each of the first layers.

        Args:
            x: The input of the first layer.
            ctx: The context, whose tokens are in the order of `x`.
        """
        # [B, T, n, D] -> [n, B, T, D]
        return None if ctx.features is None else jnp.moveaxis(ctx.features, 2, 0)

    def leave(self, x: Any, ctx: Context) -> Float[Array, "B T C"]:
        """Returns the input of the head: the last layer's `x`, `B T D`, normed and in natural order; and a one behind
        it if the head has a bias.
        """
        hidden = zigzag_unshard(self.norm(x.x if isinstance(x, Carry) else x), ctx)
        return hidden if self.head_bias is None else jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)

    def head_weight(self) -> Float[Array, "V C"]:
        """Returns the head's matrix, `V D`, of the embedding if they are tied; a bias is one more column."""
        weight = (self.head or self.embed).w[...]
        return weight if self.head_bias is None else jnp.concatenate([weight, self.head_bias[...][:, None]], axis=1)

    def logits(self, hidden: Float[Array, "B T C"]) -> Float[Array, "B T V"]:
        """Returns the logits of the next token, soft-capped if the model has a soft-cap."""
        # [B, T, D] -> [B, T, V]
        vectors = hidden if self.head_bias is None else hidden[..., :-1]
        logits = constrain((self.head or self.embed).logits(vectors), "batch", "seq", "act_vocab")
        if self.head_bias is not None:
            logits = logits + for_each_token(self.head_bias[...].astype(logits.dtype), logits.shape)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def init_cache(
        self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None
    ) -> Cache:
        """Makes an empty cache.

        Args:
            batch: Number B of rows.
            capacity: Maximum number of tokens in a row; results do not depend on it.
            dtype: Dtype of the stored values; int8 and float8 are quantized.
            rope_length: See `Cache`.

        Raises:
            ValueError: for an encoder, whose tokens attend to later ones.
        """
        if not self.has_cache:
            raise ValueError(
                f"{type(self).__name__} is an encoder, which has no cache: its tokens attend to later ones. Call it with "
                "whole sequences, or with inference.denoise if it is a diffusion model"
            )
        layers = self.layers.init_cache(batch, capacity, dtype)
        moves = any(reader.moves_positions for reader in self.inputs.values())
        offset = jnp.zeros(batch, jnp.int32) if moves else None
        return Cache(layers, jnp.zeros(batch, jnp.int32), rope_length, offset)

    def predict_ahead(self, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"], **inputs: Any) -> list[MTPOutput]:
        """Predicts further ahead from the final `hidden`.

        Args:
            hidden: The model's output, `B T D`.
            tokens: Ids, `B T`.
            **inputs: `positions`, `segment_ids`, `valid`, `remat`.

        Returns:
            One output per module of `mtp` (`nn.mtp.predict_ahead`).
        """
        # The modules share the model's embedding.
        return predict_ahead(self.mtp, self.embed, hidden, tokens, ropes=self.ropes, **inputs)

    def draft(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        *,
        cache: Cache,
        valid: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Applies the first module to the tokens after those in its cache (`nn.mtp.SupportsDrafting`)."""
        # [B, T]: the whole prompt at first, then one or two tokens per row.
        ctx = make_context(*tokens.shape, valid=valid, cache=cache, masks=self.masks, ropes=self.ropes)
        embedded = self.embed(tokens, dtype=hidden.dtype)
        hidden, layers, _ = self._drafter(hidden, embedded, ctx, cache.layers)
        return hidden, cache.advanced(layers, ctx)

    def init_draft_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16) -> Cache:
        """Makes an empty cache of the first module."""
        layers = self._drafter.init_cache(batch, capacity, dtype)
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    @property
    def _drafter(self) -> MTP:
        """Returns the first module; raises ValueError if there is none."""
        if not len(self.mtp):
            raise ValueError(
                f"this {type(self).__name__} does not draft: it has no MTP module; load it with num_mtp=1 if its family has "
                "them, or pass drafter=, a model that drafts for it"
            )
        return self.mtp[0]

    @property
    def max_length(self) -> int | None:
        """Number of positions that the model supports; None if there is no limit."""
        return min((rope.max_length for rope in self.ropes if rope.max_length is not None), default=None)
